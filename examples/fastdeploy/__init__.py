"""FastDeploy's link between API server and engine, on stand-ins for its classes: ``python -m examples.fastdeploy``."""
