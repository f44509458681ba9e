"""A queue whose producer is on another host: the same calls over ``tcp://``.

The payload travels as ZeroMQ frames. A large array is not copied on either side: it is sent from where it lies, and
arrives as a read-only view of the frame. So *an array that was put must not change until it is acknowledged*; see
``RemoteProducerBase``.
"""

from fmq.remote.consumer import AsyncRemoteConsumer, RemoteConsumer, RemoteMessage
from fmq.remote.link import CurveKeys
from fmq.remote.producer import AsyncRemoteProducer, RemoteProducer

__all__ = [
    "AsyncRemoteConsumer",
    "AsyncRemoteProducer",
    "CurveKeys",
    "RemoteConsumer",
    "RemoteMessage",
    "RemoteProducer",
]
