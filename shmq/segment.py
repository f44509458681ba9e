"""Segments of POSIX shared memory: the only place that touches posix_ipc, mmap and flock.

A segment is created exclusively, for its user alone (mode 0600), with all its pages allocated, so that a full
``/dev/shm`` is an error here and never a SIGBUS later. Its owner holds ``flock`` on it for life. The kernel drops the
lock when the process is gone, however it went and in whatever PID namespace, and that is how an orphan is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from typing import Protocol

import posix_ipc

from shmq import layout
from shmq.errors import (
    ForeignSegmentError,
    LayoutVersionError,
    SegmentError,
    SegmentExistsError,
    SegmentLimitError,
    SegmentMissingError,
    SegmentSpaceError,
    TruncatedSegmentError,
    ViewsHeldError,
)

DIRECTORY = "/dev/shm"
MAKING = "making-"
"""What the name of a segment begins with until it is whole."""
MAX_NAME_BYTES = 240

_MADV_POPULATE_WRITE = 23
"""madvise(2)"""
_libc = ctypes.CDLL(None)

_SYSTEM_ERRORS = (OSError, ValueError, posix_ipc.Error)
_LIMITS = {
    errno.EMFILE: "this process has no descriptor left (ulimit -n)",
    errno.ENFILE: "the host has no descriptor left (fs.file-max)",
    errno.ENOMEM: "this process has reached its limit of address space (ulimit -v) or of mappings (vm.max_map_count)",
}
_KINDS = {
    layout.RING_MAGIC: "ring",
    layout.SPILL_MAGIC: "spill segment",
    layout.TOPIC_MAGIC: "topic's ring",
    layout.BOARD_MAGIC: "board",
}


class Segment:
    """One mapped segment. Made by ``create`` or ``attach``; not for use in a forked child (its lock stays behind).

    ``memory`` is the mapping, for copies in and out; ``words`` the same bytes as 64-bit words, for single stores and
    loads; ``size`` the length of both in bytes, header included. Methods may be called from any thread.
    """

    __slots__ = ("__weakref__", "_lock_fd", "memory", "name", "size", "words")

    def __init__(self, name: str, memory: mmap.mmap, size: int, lock_fd: int) -> None:
        self.name = name
        self.memory = memory
        self.size = size
        self.words: memoryview = memoryview(memory).cast("Q")
        self._lock_fd = lock_fd
        abandon_in_child(self)

    @classmethod
    def create(cls, name: str, payload_bytes: int, *, magic: int = layout.RING_MAGIC, ring_id: bytes = b"") -> Segment:
        """Create a segment that holds ``payload_bytes`` after its header, own it, and write its identity.

        Raises SegmentExistsError, SegmentSpaceError, or SegmentError for a name that can't be used.
        """
        _check_name(name)
        size = layout.HEADER_BYTES + layout.align(payload_bytes, layout.PAGE)
        _check_space(name, size)
        for last in (False, False, True):
            try:
                return cls._create(name, size, payload_bytes, magic, ring_id)
            except SegmentMissingError:
                # Somebody who looked for orphans took it for one while it was made.
                if last:
                    raise
        raise AssertionError

    @classmethod
    def _create(cls, name: str, size: int, payload_bytes: int, magic: int, ring_id: bytes) -> Segment:
        # Made under another name and linked when it is whole: nobody ever sees half a segment under its own name.
        making = MAKING + name
        with contextlib.ExitStack() as undo:
            with no_fork:
                fd = undo.enter_context(_Descriptor(_open_new(name, making)))
                undo.callback(unlink, making)
                lock = undo.enter_context(_Descriptor(_open(making)))
                if not _lock(lock.fd) or os.fstat(lock.fd).st_nlink == 0:
                    raise SegmentMissingError(f"segment {name} was taken for an orphan while it was made; try again")
            # A second for a GiB: other threads may fork meanwhile, and look for who lives.
            _allocate(name, fd.fd, size)
            memory = _map(name, fd.fd, size)
            with no_fork:
                segment = cls(name, memory, size, lock.detach())
            try:
                segment._write_identity(magic, payload_bytes, ring_id)
                os.link(os.path.join(DIRECTORY, making), os.path.join(DIRECTORY, name))
            except FileExistsError:
                segment.close()
                raise SegmentExistsError(f"segment {name} exists already; choose another name") from None
            except OSError as error:
                segment.close()
                raise _system_error(f"segment {name} can't be given its name in {DIRECTORY}", error) from error
        return segment

    @classmethod
    def attach(cls, name: str, *, magic: int = layout.RING_MAGIC) -> Segment:
        """Map a segment that another process made, for reading and for storing release bytes.

        Raises SegmentMissingError, ForeignSegmentError, LayoutVersionError or TruncatedSegmentError.
        """
        _check_name(name)
        with contextlib.ExitStack() as undo:
            with no_fork:
                lock = undo.enter_context(_Descriptor(_open(name)))
                # Through a description of its own: a mapping keeps one, and in a forked child that would keep the lock.
                again = undo.enter_context(_Descriptor(_open_again(name, lock.fd)))
            # Before anything is mapped: to map a file is to allocate its pages.
            size = _check_identity(name, lock.fd, magic)
            memory = _map(name, again.fd, size)
            with no_fork:
                return cls(name, memory, size, lock.detach())

    def _write_identity(self, magic: int, payload_bytes: int, ring_id: bytes) -> None:
        words = self.words
        self.memory[layout.NAME_BYTE : layout.NAME_BYTE + layout.NAME_BYTES] = self.name.encode().ljust(
            layout.NAME_BYTES, b"\0"
        )
        self.memory[layout.RING_ID_BYTE : layout.RING_ID_BYTE + 16] = ring_id.ljust(16, b"\0")
        words[layout.LAYOUT_VERSION] = layout.VERSION
        words[layout.HEADER_SIZE] = layout.HEADER_BYTES
        words[layout.RING_SIZE] = payload_bytes
        words[layout.OWNER_PID] = os.getpid()
        words[layout.CREATED] = time.time_ns()
        words[layout.MAGIC] = magic

    @property
    def ring_id(self) -> bytes:
        """The 16 random bytes that tell one ring from every other."""
        return bytes(self.memory[layout.RING_ID_BYTE : layout.RING_ID_BYTE + 16])

    @property
    def payload_bytes(self) -> int:
        """Bytes after the header: the ring's size, or what a spill segment can hold."""
        return int(self.words[layout.RING_SIZE])

    def adopt(self) -> bool:
        """Take the owner's lock if the owner is dead. True if it is this process's now; never waits."""
        return self._lock_fd >= 0 and _lock(self._lock_fd)

    def claim(self, slot: int = 0) -> bool:
        """Become the one that reads this ring by a reader slot, until ``close``. False if somebody is; never waits.

        A lock of its own kind (an open file description lock), which the owner's does not meet.
        """
        try:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _reader_lock(fcntl.F_WRLCK, slot, 1))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unclaim(self, slot: int) -> None:
        """Give up a reader slot."""
        fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _reader_lock(fcntl.F_UNLCK, slot, 1))

    def has_readers(self) -> bool:
        """Whether another mapping than this one has a reader slot."""
        found = fcntl.fcntl(self._lock_fd, fcntl.F_OFD_GETLK, _reader_lock(fcntl.F_WRLCK, 0, layout.SLOTS))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def is_linked(self) -> bool:
        """Whether the segment still has its name."""
        if self._lock_fd < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock_fd), os.lstat(os.path.join(DIRECTORY, self.name)))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Unmap, and drop the lock if it was held. The segment itself stays. Idempotent.

        Raises ViewsHeldError, and changes nothing, while arrays that look into the mapping are alive.
        """
        if self.memory.closed:
            return
        self.words.release()
        try:
            self.memory.close()
        except BufferError:
            self.words = memoryview(self.memory).cast("Q")
            raise ViewsHeldError(
                f"segment {self.name} can't be unmapped: arrays or memoryviews that look into it are alive; "
                "drop them, or take copies, and close again"
            ) from None
        self.drop_lock()

    def retire(self) -> None:
        """Drop the lock, and unmap now or, while arrays look into the mapping, as soon as the last of them is gone."""
        self.drop_lock()
        if not self.memory.closed:
            self.words.release()
            with contextlib.suppress(BufferError):
                self.memory.close()

    def drop_lock(self) -> None:
        """Close the descriptor that carries the lock; what is mapped stays mapped."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child: give up the copy of the descriptor that carries the lock. Only the owner's life counts."""
        self.drop_lock()

    def __repr__(self) -> str:
        return f"<Segment {self.name} of {self.size} bytes>"


class _Descriptor:
    """Closes a file descriptor at the end of its block, unless it was detached; and its copy in a forked child."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        abandon_in_child(self)

    def detach(self) -> int:
        fd, self.fd = self.fd, -1
        return fd

    def abandon(self) -> None:
        self.__exit__()

    def __enter__(self) -> _Descriptor:
        return self

    def __exit__(self, *exc: object) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def unlink(name: str) -> bool:
    """Remove a segment's name; its memory goes with its last mapping. False if there was none. Raises SegmentError."""
    _check_name(name)
    try:
        posix_ipc.unlink_shared_memory("/" + name)
    except posix_ipc.ExistentialError:
        return False
    except _SYSTEM_ERRORS as error:
        raise _system_error(f"segment {name} can't be removed", error) from error
    return True


def names(prefix: str) -> list[str]:
    """The names of all segments (shmq's or not) that begin with ``prefix``, sorted. Raises SegmentError."""
    try:
        return sorted(name for name in os.listdir(DIRECTORY) if name.startswith(prefix))
    except OSError as error:
        raise _system_error(f"{DIRECTORY} can't be listed", error) from error


def is_owned(name: str) -> bool:
    """Whether a living process holds the owner's lock of a segment. Raises SegmentMissingError."""
    with no_fork, _Descriptor(_open(name)) as descriptor:
        return not _lock(descriptor.fd)


def size_of(name: str) -> int:
    """The bytes of a segment, 0 if there is none of that name."""
    try:
        return os.lstat(os.path.join(DIRECTORY, name)).st_size
    except FileNotFoundError:
        return 0


def free_bytes() -> int:
    """How many bytes the shared-memory directory has left."""
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def _open(name: str) -> int:
    try:
        return int(posix_ipc.SharedMemory("/" + name).fd)
    except posix_ipc.ExistentialError:
        raise SegmentMissingError(f"there is no segment {name} in {DIRECTORY}; its owner has removed it") from None
    except _SYSTEM_ERRORS as error:
        raise _system_error(f"segment {name} can't be opened", error) from error


def _system_error(what: str, error: Exception) -> SegmentError:
    number = getattr(error, "errno", None)
    if number is None and "files" in str(error):
        # posix_ipc's own words for both limits of descriptors.
        number = errno.EMFILE
    if number in _LIMITS:
        return SegmentLimitError(f"{what}: {error}; {_LIMITS[number]}")
    if number == errno.ENOSPC:
        return SegmentSpaceError(f"{what}: {error}; it may have no inode left (df -i {DIRECTORY})")
    return SegmentError(f"{what}: {error}")


def _open_new(name: str, making: str) -> int:
    try:
        return int(posix_ipc.SharedMemory("/" + making, flags=posix_ipc.O_CREX, mode=0o600, size=0).fd)
    except posix_ipc.ExistentialError:
        raise SegmentExistsError(f"segment {name} is being made by somebody else; choose another name") from None
    except _SYSTEM_ERRORS as error:
        raise _system_error(f"segment {name} can't be created in {DIRECTORY}", error) from error


def _open_again(name: str, fd: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _system_error(f"segment {name} can't be opened", error) from error


def _check_name(name: str) -> None:
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        length = 0
    longest = MAX_NAME_BYTES + (len(MAKING) if name.startswith(MAKING) else 0)
    if not 0 < length <= longest or "/" in name or "\0" in name:
        raise SegmentError(
            f"{name!r} can't name a segment: 1 to {MAX_NAME_BYTES} bytes of UTF-8 are needed, without slash and NUL"
        )


def _check_identity(name: str, fd: int, magic: int) -> int:
    """The size in bytes of the segment that is open as ``fd``, if it is what it should be."""
    size = os.fstat(fd).st_size
    if size < layout.HEADER_BYTES:
        raise TruncatedSegmentError(
            f"segment {name} has {size} bytes, and its header alone takes {layout.HEADER_BYTES}; it was cut short, and "
            "can't be read"
        )
    head = os.pread(fd, 4 * 8, 0)
    found, version, header_size, ring_size = struct.unpack("@4Q", head)
    if found != magic:
        raise ForeignSegmentError(
            f"segment {name} is no shmq {_KINDS[magic]}: it begins with {head[:8]!r}; something else made the file of "
            f"that name in {DIRECTORY}, and it was left alone"
        )
    if version != layout.VERSION or header_size != layout.HEADER_BYTES:
        raise LayoutVersionError(
            f"segment {name} has layout {version}, and this version of shmq reads layout {layout.VERSION}; run the "
            "same version of shmq in all processes of a queue"
        )
    expected = layout.HEADER_BYTES + layout.align(ring_size, layout.PAGE)
    if expected != size:
        raise TruncatedSegmentError(
            f"segment {name} has {size} bytes, and its header says {expected}; it was damaged, and its messages can't "
            "be read"
        )
    return size


_FLOCK = struct.Struct("@hhqqi0q")
"""A struct flock: type, whence, start, length, pid."""


def _reader_lock(kind: int, slot: int, slots: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, slot, slots, 0)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_space(name: str, size: int) -> None:
    free = free_bytes()
    if size > free:
        raise _space_error(name, size, free)


def _allocate(name: str, fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EFBIG, errno.ENOMEM}:
            raise _space_error(name, size, free_bytes()) from None
        raise SegmentError(f"{size} bytes can't be allocated for segment {name}: {error}") from error


def _space_error(name: str, size: int, free: int) -> SegmentSpaceError:
    return SegmentSpaceError(
        f"{DIRECTORY} has {free:,} bytes free, and segment {name} asks for {size:,}; ask for a smaller ring, run "
        "`shmq gc` to remove what dead processes left, or enlarge it (docker run --shm-size=..., or "
        f"mount -o remount,size=... {DIRECTORY})"
    )


def _map(name: str, fd: int, size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise _system_error(f"{size:,} bytes of segment {name} can't be mapped", error) from error
    # At once: a first touch of each page in the middle of a message costs more than the copy. Not by MAP_POPULATE, for
    # which mmap keeps the interpreter, half a second for a GiB. Linux before 5.14 can't, and does it page by page.
    start = ctypes.c_char.from_buffer(memory)
    _libc.madvise(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
    return memory


no_fork = threading.RLock()
"""Held while a descriptor with a lock exists that nobody would close in a child: a fork waits for it. Never for long.

A child that got a copy of such a descriptor would not know that it has to close it, and would keep the lock of a
parent that is dead.
"""
os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)


class Abandons(Protocol):
    """What has something to give up in a forked child."""

    def abandon(self) -> None:
        """Leave to the parent what is the parent's."""


_abandoned_in_child: weakref.WeakSet[Abandons] | None = None


def abandon_in_child(thing: Abandons) -> None:
    """Call ``thing.abandon()`` in every child that this process forks from now on, as long as the thing lives."""
    global _abandoned_in_child
    if _abandoned_in_child is None:
        _abandoned_in_child = weakref.WeakSet()
        os.register_at_fork(after_in_child=_abandon_all)
    _abandoned_in_child.add(thing)


def _abandon_all() -> None:
    for thing in list(_abandoned_in_child or ()):
        thing.abandon()
