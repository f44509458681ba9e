"""Measures what the queue promises about speed and memory, beside other ways to do the same. ``python -m bench -h``."""
