"""The settings of the FastDeploy faces, as ``FMQ_CONFIG_JSON`` has them.

Everything is checked when it is read: a key that is none, a value of the wrong type or outside its limits is one
ConfigError that names its path, such as ``$.endpoints.q_a2e.protocol``. docs/fastdeploy.md lists every key.
"""

from __future__ import annotations

import difflib
import enum
import os
import stat
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import msgspec
import zmq

from fmq.errors import ConfigError
from fmq.paths import QueuePath, default_runtime_dir
from fmq.producer import CLOSE_TIMEOUT, RING_SIZE, SPILL_LIMIT, TIMEOUT
from fmq.topics import PATIENCE

ENVIRONMENT = "FMQ_CONFIG_JSON"

MIB = 1024 * 1024

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
Path = Annotated[str, msgspec.Meta(min_length=1)]
Protocol = Literal["ipc", "tcp"]
Codec = Literal["pickle", "msgpack"]
Policy = Literal["block", "skip", "drop"]
RingSize = Annotated[int, msgspec.Meta(ge=64 * 1024, le=64 * 1024 * MIB)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Threads = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Milliseconds = Annotated[int, msgspec.Meta(ge=-1)]


_COMMON = ("io_threads", "copy", "ring_size", "spill_limit", "put_timeout", "codec", "policy", "patience")
"""The settings that an endpoint may have of its own."""


class EndpointType(enum.Enum):
    """What can be at an endpoint."""

    QUEUE = "queue"
    TOPIC = "topic"


class Role(enum.Enum):
    """On which side of a queue one is."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class SocketOptions(msgspec.Struct, frozen=True):
    """ZeroMQ's options, for what is still sent through sockets: tcp endpoints. A ring has no use for them.

    ``linger`` (milliseconds, -1 for "as ``close_timeout`` says") is also how long closing a producer waits.
    """

    sndhwm: Count = 0
    rcvhwm: Count = 0
    linger: Milliseconds = -1
    sndbuf: Bytes = 32 * MIB
    rcvbuf: Bytes = 32 * MIB
    immediate: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1

    def apply(self, socket: zmq.Socket[Any], is_producer: bool) -> None:
        """Set them on a ZeroMQ socket."""
        socket.setsockopt(zmq.LINGER, self.linger)
        socket.setsockopt(zmq.IMMEDIATE, self.immediate)
        if is_producer:
            socket.setsockopt(zmq.SNDHWM, self.sndhwm)
            socket.setsockopt(zmq.SNDBUF, self.sndbuf)
        else:
            socket.setsockopt(zmq.RCVHWM, self.rcvhwm)
            socket.setsockopt(zmq.RCVBUF, self.rcvbuf)


class Curve(msgspec.Struct, frozen=True):
    """The CURVE keys of a tcp endpoint, each 40 characters of Z85; see ``fmq.CurveKeys``.

    ``public`` and ``secret`` are this process's own. A producer needs its consumer's public key, ``server``; a consumer
    takes only ``clients``, if it is given their public keys.
    """

    public: Key
    secret: Key
    server: Key | None = None
    clients: tuple[Key, ...] | None = None

    def __repr__(self) -> str:
        return f"Curve(public={self.public!r}, secret=..., server={self.server!r}, clients={self.clients!r})"


class Endpoint(msgspec.Struct, frozen=True):
    """Where a queue or topic is, and what is different about it; what is None is as the Config says.

    ``address``: of an ipc endpoint a path, whose directory takes the place of ``ipc_root`` and whose last part names
    the queue; of a tcp endpoint "host:port", which ``curve`` is for.
    """

    protocol: Protocol
    address: Path
    io_threads: Threads | None = None
    copy: bool | None = None
    ring_size: RingSize | None = None
    spill_limit: Bytes | None = None
    put_timeout: Seconds | None = None
    codec: Codec | None = None
    policy: Policy | None = None
    patience: Seconds | None = None
    curve: Curve | None = None


class Config(msgspec.Struct, frozen=True):
    """All settings. Sizes are bytes, timeouts seconds.

    Attributes
        ipc_root: the directory of sockets and locks; None for ``$FMQ_RUNTIME_DIR`` and what docs/queue.md says of it.
        io_threads: threads of ZeroMQ for tcp endpoints; a ring needs none.
        copy: whether payloads are copied out of the ring, so that they are private and writable.
        endpoints: what is different about single queues and topics, by name.
        socket_config: options of ZeroMQ's sockets.
        namespace: what keeps the queues of two services apart; None for ``$FMQ_NAMESPACE``, else "default".
        ring_size: of each producer.
        spill_limit: what each producer may have beside its ring.
        put_timeout: how long ``put`` waits for room.
        close_timeout: how long closing a producer waits until everything is done.
        codec: "pickle" for any object, or "msgpack", which never runs what a message says.
        policy: what becomes of readers of a topic that are too slow; see PublisherBase.
        patience: how long ``pub`` waits for them before.
        metrics: whether to count for prometheus_client, in its own registry; see docs/metrics.md.
    """

    ipc_root: Path | None = None
    io_threads: Threads = 1
    copy: bool = False
    endpoints: dict[str, Endpoint] = {}
    socket_config: SocketOptions = SocketOptions()
    namespace: Name | None = None
    ring_size: RingSize = RING_SIZE
    spill_limit: Bytes = SPILL_LIMIT
    put_timeout: Seconds = TIMEOUT
    close_timeout: Seconds = CLOSE_TIMEOUT
    codec: Codec = "pickle"
    policy: Policy = "block"
    patience: Seconds = PATIENCE
    metrics: bool = False

    @property
    def closing(self) -> float:
        """How many seconds closing a producer waits."""
        linger = self.socket_config.linger
        return self.close_timeout if linger < 0 else linger / 1000

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint of this name, with every setting filled in. Raises QueueNameError for what can't be a name."""
        QueuePath(name, self.namespace, "/")
        found = self.endpoints.get(name)
        if found is None:
            found = Endpoint("ipc", os.path.join(self.ipc_root or default_runtime_dir(), name))
        missing = {field: getattr(self, field) for field in _COMMON if getattr(found, field) is None}
        return msgspec.structs.replace(found, **missing)

    def place(self, name: str) -> tuple[str, str]:
        """The core's name of the queue of an ipc endpoint, and its runtime directory."""
        endpoint = self.endpoints.get(name)
        if endpoint is None:
            return name, _private(self.ipc_root)
        directory, queue = os.path.split(endpoint.address.removeprefix("ipc://"))
        return queue, _private(directory or self.ipc_root)


def _private(root: str | None) -> str:
    """A directory for this user alone: ``root``, or, if others may write there, as to /dev/shm, one in it."""
    if root is None:
        return default_runtime_dir()
    try:
        status = os.stat(root)
    except OSError:
        # Not there yet, and made by who needs it, or an error there.
        return root
    if stat.S_ISDIR(status.st_mode) and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return os.path.join(root, f"fmq-{os.getuid()}")
    return root


class EndpointManager:
    """The settings of this process. Read when they are first needed, not at import."""

    config: ClassVar[Config | None] = None

    @classmethod
    def load_config(cls, file_path: str | os.PathLike[str] | None = None) -> Config:
        """Read the settings anew: from a JSON file if one is named, else from ``$FMQ_CONFIG_JSON``, else the defaults.

        Raises ConfigError, and keeps those from before.
        """
        if file_path is not None:
            source = os.fspath(file_path)
            try:
                with open(source, "rb") as file:
                    text = file.read()
            except OSError as error:
                raise ConfigError(f"the settings in {source} can't be read: {error}") from error
        else:
            source, text = ENVIRONMENT, os.fsencode(os.environ.get(ENVIRONMENT, ""))
        cls.config = parse(text, source) if text.strip() or file_path is not None else Config()
        return cls.config

    @classmethod
    def current(cls) -> Config:
        """The settings, read if that was not done yet."""
        return cls.config if cls.config is not None else cls.load_config()

    @classmethod
    def get_endpoint(cls, name: str) -> Endpoint:
        """The endpoint of a queue or topic."""
        return cls.current().endpoint(name)


T = TypeVar("T", bound=msgspec.Struct)

_OBJECTS: dict[str, type[msgspec.Struct]] = {"socket_config": SocketOptions, "curve": Curve}
"""Settings that are objects themselves."""
_SECRET = "secret"


def parse(text: bytes | str, source: str = ENVIRONMENT) -> Config:
    """The settings in a JSON text. Raises ConfigError, which begins with ``source`` and the path to what is wrong."""
    try:
        tree = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    return _struct(Config, tree, source, "$")


def _struct(kind: type[T], tree: Any, source: str, path: str) -> T:
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: {path} has to be an object, not {_kind_of(tree)}")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{path}.{key}"
        field = fields.get(key)
        if field is None:
            near = difflib.get_close_matches(key, fields, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"{source}: {where} is no setting{meant}; those here are {', '.join(fields)}")
        if key == "endpoints":
            found[key] = _endpoints(value, source, where)
        elif key in _OBJECTS and value is not None:
            found[key] = _struct(_OBJECTS[key], value, source, where)
        else:
            found[key] = _value(field.type, value, source, where)
    for name, field in fields.items():
        if field.required and name not in found:
            raise ConfigError(f"{source}: {path}.{name} is missing")
    return kind(**found)


def _endpoints(tree: Any, source: str, path: str) -> dict[str, Endpoint]:
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: {path} has to be an object, not {_kind_of(tree)}")
    endpoints = {}
    for name, value in tree.items():
        where = f"{path}.{name}"
        _value(Name, name, source, where)
        endpoint = endpoints[name] = _struct(Endpoint, value, source, where)
        host, _, port = endpoint.address.rpartition(":")
        if endpoint.protocol == "tcp" and not (host and port.isdecimal()):
            raise ConfigError(f'{source}: {where}.address has to be "host:port", not {endpoint.address!r}')
        if endpoint.protocol == "ipc" and endpoint.curve is not None:
            raise ConfigError(f"{source}: {where}.curve is for endpoints of protocol tcp")
        if endpoint.protocol == "ipc":
            queue = os.path.basename(endpoint.address)
            _value(Name, queue, source, f"{where}.address, whose last part names the queue,")
    return endpoints


def _value(kind: Any, value: Any, source: str, path: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason = str(error)
        if reason.startswith("Invalid enum"):
            reason = f"expected one of {', '.join(map(repr, _choices(kind)))}"
        shown = "..." if path.endswith(_SECRET) else f"{value!r:.80}"
        raise ConfigError(f"{source}: {path} is {shown}: {reason[:1].lower()}{reason[1:]}") from None


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _kind_of(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
