"""Where a queue lives: its socket, its lock, and the names of its rings.

All of a namespace's sockets and locks lie in one directory of mode 0700, ``<runtime>/<namespace>``. The runtime
directory is, in this order, what the caller names, ``$FMQ_RUNTIME_DIR``, ``$XDG_RUNTIME_DIR/fmq``, or ``fmq-<user id>``
in the temporary directory. Two services that must not meet use two namespaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import stat
import tempfile
import time

from fmq.errors import FmqError, QueueInUseError, QueueNameError
from shmq import Finding
from shmq.segment import abandon_in_child, no_fork

DEFAULT_NAMESPACE = "default"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MAX_SOCKET_PATH = 107
_LOCK_TRIES = 20
_LOCK_PAUSE = 0.01
_MAKE_TRIES = 20


class QueuePath:
    """The places of one queue. Raises QueueNameError at once for what can't be a name or would be too long a path."""

    kind = "queue"
    holder = "consumer"
    """What the one process is that has the lock."""
    _mark = ""

    def __init__(
        self, queue: str, namespace: str | None = None, runtime_dir: str | os.PathLike[str] | None = None
    ) -> None:
        if namespace is None:
            namespace = os.environ.get("FMQ_NAMESPACE") or DEFAULT_NAMESPACE
        self.queue = _check_name(self.kind, queue)
        self.namespace = _check_name("namespace", namespace)
        if runtime_dir is not None and not isinstance(runtime_dir, str | os.PathLike):
            raise QueueNameError(f"a runtime directory is a path; this one is {runtime_dir!r}")
        # Absolute, for the process may change its directory.
        self._runtime = os.path.abspath(os.fspath(runtime_dir or default_runtime_dir()))
        self.directory = os.path.join(self._runtime, namespace)
        self.label = f"{self._mark}{queue}"
        """What nothing else in the namespace is called, be it queue or topic."""
        self.socket = os.path.join(self.directory, f"{self.label}.sock")
        self.lock = os.path.join(self.directory, f"{self.label}.lock")
        self.rings = f"shmq:{namespace}:{self.label}:"
        """What the names of its segments begin with."""
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_PATH:
            raise QueueNameError(
                f"the socket path {self.socket} has {len(os.fsencode(self.socket))} bytes, and a unix socket takes "
                f"{_MAX_SOCKET_PATH}; choose a shorter name or set FMQ_RUNTIME_DIR to a shorter directory"
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.queue}"

    @property
    def endpoint(self) -> str:
        """The ZeroMQ address of the doorbell."""
        return f"ipc://{self.socket}"

    def make_directory(self) -> None:
        """Make the namespace's directory, for this user alone. Raises FmqError if others could write there."""
        for directory in (self._runtime, self.directory):
            try:
                _make_directory(directory)
            except OSError as error:
                raise FmqError(
                    f"{directory}, for the sockets of queues, can't be made: {error}; set FMQ_RUNTIME_DIR to a "
                    "directory that can"
                ) from error
            try:
                status = os.stat(directory)
            except FileNotFoundError:
                # Removed meanwhile by who found it empty; whoever needs it makes it again.
                continue
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise FmqError(
                    f"{directory} can't hold the sockets of queues: it has to be a directory of user {os.getuid()} "
                    f"that nobody else may write to, and it belongs to user {status.st_uid} with mode "
                    f"{stat.S_IMODE(status.st_mode):04o}; remove it, or set FMQ_RUNTIME_DIR"
                )

    def tidy(self) -> None:
        """Remove the directories if nothing is left in them."""
        for directory in (self.directory, self._runtime):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


class TopicPath(QueuePath):
    """The places of one topic, of which its publisher has the lock. No queue has the same, whatever its name."""

    kind = "topic"
    holder = "publisher"
    _mark = "@"


class QueueLock:
    """The lock that makes a consumer the only one of its queue; the kernel drops it when the process is gone."""

    def __init__(self, path: QueuePath) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock. Raises QueueInUseError, naming the pid that has it, if another consumer is alive."""
        for _ in range(_LOCK_TRIES):
            self._path.make_directory()
            with no_fork:
                if self._try():
                    return
            # A producer that asks whether anybody is there holds the lock for an instant.
            time.sleep(_LOCK_PAUSE)
        pid = _read_pid(self._path.lock)
        raise QueueInUseError(
            f"{self._path} in namespace {self._path.namespace} has a {self._path.holder} already, process "
            f"{pid or 'unknown'}; stop that one, or use another {self._path.kind} name or namespace (FMQ_NAMESPACE)",
            pid,
        )

    def _try(self) -> bool:
        try:
            fd = os.open(self._path.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(fd, self._path.lock):
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                self._fd = fd
                abandon_in_child(self)
                return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            if self._fd != fd:
                os.close(fd)
        return False

    def _unusable(self, error: OSError) -> FmqError:
        return FmqError(
            f"the lock file {self._path.lock} can't be made or written: {error}; make room, or set FMQ_RUNTIME_DIR to "
            "a directory that can be written to"
        )

    def release(self) -> None:
        """Remove the lock file and drop the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path.lock)
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child: close the copy of the descriptor, and leave the lock and its file to the parent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def collect_files(namespace: str | None = None) -> list[Finding]:
    """Remove the sockets and locks of consumers and publishers that are dead, of one namespace or of all.

    Only of the default runtime directory. Returns a finding for each queue and topic whose files were removed.
    """
    runtime = default_runtime_dir()
    findings = []
    for directory in sorted(glob.glob(os.path.join(runtime, glob.escape(namespace) if namespace else "*"))):
        for lock in sorted(glob.glob(os.path.join(directory, "*.lock"))):
            if _discard(lock):
                findings.append(Finding(lock, 0, True, "the process that had this lock and its socket is dead"))
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    with contextlib.suppress(OSError):
        os.rmdir(runtime)
    return findings


def discard_files(path: QueuePath) -> None:
    """Remove the socket and the lock of one queue, unless its consumer lives."""
    _discard(path.lock)
    path.tidy()


def _discard(lock: str) -> bool:
    with no_fork, contextlib.suppress(OSError):
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(fd, lock):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(lock.removesuffix(".lock") + ".sock")
                os.unlink(lock)
                return True
        finally:
            os.close(fd)
    return False


def consumer_is_alive(path: QueuePath) -> bool:
    """Whether a process (running or stopped) holds the consumer's lock of a queue, or it can't be told."""
    with no_fork:
        try:
            fd = os.open(path.lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            # No descriptor left, say. Nobody is taken for dead for that.
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def default_runtime_dir() -> str:
    """Where sockets and locks go if nobody says otherwise."""
    if configured := os.environ.get("FMQ_RUNTIME_DIR"):
        return configured
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "fmq")
    return os.path.join(tempfile.gettempdir(), f"fmq-{os.getuid()}")


def _check_name(kind: str, name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise QueueNameError(
            f"{name!r} can't name a {kind}: it takes 1 to 64 letters, digits, '_', '-' and '.', and may not begin with "
            "one of the last two"
        )
    return name


def _make_directory(directory: str) -> None:
    for left in reversed(range(_MAKE_TRIES)):
        try:
            with contextlib.suppress(FileExistsError):
                os.makedirs(directory, mode=0o700)
            return
        except FileNotFoundError:
            # Somebody who left has removed the one above meanwhile, for it was empty.
            if not left:
                raise


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read_pid(path: str) -> int | None:
    try:
        with open(path, "rb") as file:
            return int(file.read(20) or b"0") or None
    except (OSError, ValueError):
        return None
