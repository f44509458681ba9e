"""The engine's side: requests as Paddle tensors over the ring, run in batches, answered to whoever asked."""

from engine.engine import Engine
from engine.errors import EngineError, HandlerNameError, PlaceError, RequestError, SchedulerError, TensorError
from engine.handlers.named import load_handler
from engine.handlers.patch_stats import patch_stats
from engine.scheduling import BatchScheduler, Handler, Scheduler
from engine.tasks import Result, Task
from engine.tensors import load_paddle, to_paddle

__all__ = [
    "BatchScheduler",
    "Engine",
    "EngineError",
    "Handler",
    "HandlerNameError",
    "PlaceError",
    "RequestError",
    "Result",
    "Scheduler",
    "SchedulerError",
    "Task",
    "TensorError",
    "load_handler",
    "load_paddle",
    "patch_stats",
    "to_paddle",
]
