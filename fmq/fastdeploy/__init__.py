"""FastDeploy's names for the queue. ``fmq.fastdeploy.sync`` has those of its synchronous form."""

from fmq.config import Config, Endpoint, EndpointManager, EndpointType, Role, SocketOptions
from fmq.fastdeploy.component import Context
from fmq.fastdeploy.factory import FMQ, FMQFactory
from fmq.fastdeploy.message import Descriptor, Message
from fmq.fastdeploy.queue import Queue
from fmq.fastdeploy.topic import Topic

__all__ = [
    "FMQ",
    "Config",
    "Context",
    "Descriptor",
    "Endpoint",
    "EndpointManager",
    "EndpointType",
    "FMQFactory",
    "Message",
    "Queue",
    "Role",
    "SocketOptions",
    "Topic",
]
