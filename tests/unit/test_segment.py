from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from shmq import (
    ForeignSegmentError,
    LayoutVersionError,
    Segment,
    SegmentError,
    SegmentExistsError,
    SegmentMissingError,
    SegmentSpaceError,
    ShmqError,
    TruncatedSegmentError,
    ViewsHeldError,
    layout,
    segment,
)

SIZE = 64 * 1024
MakeName = Callable[[], str]


def path(name: str) -> str:
    return os.path.join(segment.DIRECTORY, name)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return path(name) in maps.read()


def until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return met


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "dev", "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@contextmanager
def running(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line, and is killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def owned(make_name: MakeName) -> Iterator[Segment]:
    made = Segment.create(make_name(), SIZE, ring_id=b"0123456789abcdef")
    yield made
    segment.unlink(made.name)
    made.close()


# -- creation ---------------------------------------------------------------------------------------------------------


def test_a_segment_carries_its_identity(owned: Segment) -> None:
    attached = Segment.attach(owned.name)
    assert attached.name == owned.name
    assert attached.ring_id == b"0123456789abcdef"
    assert attached.payload_bytes == SIZE
    assert attached.size == SIZE + layout.HEADER_BYTES == len(attached.memory)
    assert attached.words[layout.OWNER_PID] == os.getpid()
    assert 0 <= time.time_ns() - attached.words[layout.CREATED] < 60e9
    name = bytes(attached.memory[layout.NAME_BYTE : layout.NAME_BYTE + layout.NAME_BYTES])
    assert name.rstrip(b"\0") == owned.name.encode()
    attached.close()


def test_a_segment_that_exists_is_not_created_again_and_stays_as_it_is(owned: Segment) -> None:
    owned.memory[layout.HEADER_BYTES : layout.HEADER_BYTES + 5] = b"whole"
    inode = os.stat(path(owned.name)).st_ino
    before = descriptors()
    with pytest.raises(SegmentExistsError, match=owned.name):
        Segment.create(owned.name, 2 * SIZE)
    assert descriptors() == before
    assert os.stat(path(owned.name)).st_ino == inode
    assert bytes(owned.memory[layout.HEADER_BYTES : layout.HEADER_BYTES + 5]) == b"whole"
    assert segment.names(segment.MAKING + owned.name) == []


def test_a_name_under_which_another_process_is_making_a_segment_is_refused(make_name: MakeName) -> None:
    name = make_name()
    with open(path(segment.MAKING + name), "xb"):
        pass
    try:
        with pytest.raises(SegmentExistsError, match=name):
            Segment.create(name, SIZE)
        assert os.path.exists(path(segment.MAKING + name))
    finally:
        os.unlink(path(segment.MAKING + name))


@pytest.mark.parametrize("step", ["_open", "_lock"])
def test_a_segment_that_is_taken_for_an_orphan_while_it_is_made_is_made_again(
    make_name: MakeName, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    name = make_name()
    whole = getattr(segment, step)
    left = [segment.MAKING + name]

    def after_a_look_for_orphans(argument: Any) -> Any:
        if left:
            segment.unlink(left.pop())
        return whole(argument)

    monkeypatch.setattr(segment, step, after_a_look_for_orphans)
    made = Segment.create(name, SIZE)
    assert left == []
    assert made.is_linked()
    segment.unlink(name)
    made.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_segment_is_for_its_user_alone(make_name: MakeName, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = Segment.create(make_name(), SIZE)
    finally:
        os.umask(before)
    mode = os.stat(path(made.name)).st_mode
    segment.unlink(made.name)
    made.close()
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize("payload_bytes", [1, SIZE, 3 * 1024 * 1024 + 17])
def test_all_pages_of_a_segment_are_allocated_when_it_is_created(make_name: MakeName, payload_bytes: int) -> None:
    made = Segment.create(make_name(), payload_bytes)
    status = os.stat(path(made.name))
    segment.unlink(made.name)
    made.close()
    assert status.st_size == layout.HEADER_BYTES + layout.align(payload_bytes, layout.PAGE)
    assert status.st_blocks * 512 >= status.st_size


def test_nobody_sees_a_segment_under_its_name_before_it_is_whole(
    make_name: MakeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_name()
    looked: list[str] = []
    allocate = os.posix_fallocate

    def look_and_allocate(fd: int, offset: int, length: int) -> None:
        with pytest.raises(SegmentMissingError):
            Segment.attach(name)
        looked.append(name)
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", look_and_allocate)
    made = Segment.create(name, SIZE)
    Segment.attach(name).close()
    segment.unlink(name)
    made.close()
    assert looked == [name]


def test_a_creation_that_fails_half_way_leaves_nothing(make_name: MakeName, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    name = make_name()
    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(SegmentError, match=name):
        Segment.create(name, SIZE)
    assert descriptors() == before
    assert not [left for left in os.listdir(segment.DIRECTORY) if name in left]


def test_a_process_that_dies_while_it_makes_a_segment_leaves_only_a_name_that_says_so(make_name: MakeName) -> None:
    name = make_name()
    died = python(
        """
        import os, signal, sys
        from shmq import Segment
        os.posix_fallocate = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        Segment.create(sys.argv[1], 65536)
        """,
        name,
    )
    left = [left for left in os.listdir(segment.DIRECTORY) if name in left]
    for leftover in left:
        segment.unlink(leftover)
    assert died.returncode == -signal.SIGKILL
    assert left == [segment.MAKING + name]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "/a",
        ".",
        "..",
        "x" * (segment.MAX_NAME_BYTES + 1),
        "ü" * 121,
    ],
)
def test_a_name_that_can_be_no_file_is_refused(name: str) -> None:
    with pytest.raises(SegmentError):
        Segment.create(name, SIZE)
    with pytest.raises(SegmentError):
        Segment.attach(name)


@pytest.mark.parametrize("name", ["shmq-test\\0-nul", "shmq-test-\\ud800"])
@pytest.mark.parametrize("call", ["Segment.create(name, 65536)", "Segment.attach(name)", "segment.unlink(name)"])
def test_a_name_that_no_file_system_can_hold_is_a_typed_error(name: str, call: str) -> None:
    result = python(
        f"""
        from shmq import Segment, ShmqError, segment
        name = "{name}"
        try:
            print("returned", {call})
        except ShmqError:
            print("typed")
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "typed\n"


def test_the_longest_name_works_and_so_does_removing_what_is_left_of_its_making(make_name: MakeName) -> None:
    name = make_name().ljust(segment.MAX_NAME_BYTES, "x")
    try:
        made = Segment.create(name, SIZE)
        Segment.attach(name).close()
        assert segment.unlink(name)
        made.close()
        with open(path(segment.MAKING + name), "xb"):
            pass
        assert segment.unlink(segment.MAKING + name)
    finally:
        for left in os.listdir(segment.DIRECTORY):
            if name in left:
                os.unlink(path(left))


# -- too little space -------------------------------------------------------------------------------------------------


def test_a_segment_that_the_directory_has_no_room_for_is_an_error_with_sizes_and_a_remedy(make_name: MakeName) -> None:
    name = make_name()
    asked = segment.free_bytes() + (1 << 40)
    before = descriptors()
    with pytest.raises(SegmentSpaceError) as caught:
        Segment.create(name, asked)
    message = str(caught.value)
    found = re.search(r"has ([\d,]+) bytes free", message)
    assert found is not None
    assert 0 <= int(found[1].replace(",", "")) < asked
    assert f"{layout.HEADER_BYTES + layout.align(asked, layout.PAGE):,}" in message
    assert "--shm-size" in message
    assert "shmq gc" in message
    assert name in message
    assert descriptors() == before
    assert not [left for left in os.listdir(segment.DIRECTORY) if name in left]


IN_A_TINY_DIRECTORY = """
import os, sys
from shmq import RingReader, RingWriter, Segment, SegmentSpaceError, segment

def refused(call):
    before = sorted(os.listdir("/dev/shm")), segment.free_bytes()
    try:
        call()
    except SegmentSpaceError as error:
        assert "--shm-size" in str(error) and f"{before[1]:,} bytes free" in str(error), error
    else:
        sys.exit("not refused")
    assert (sorted(os.listdir("/dev/shm")), segment.free_bytes()) == before

assert segment.free_bytes() == 2 << 20
refused(lambda: Segment.create("shmq-test-big", 4 << 20))

# What is free may be gone when it comes to the allocation.
look = segment.free_bytes
def free_bytes_before_somebody_else_took_them():
    segment.free_bytes = look
    return 1 << 40
segment.free_bytes = free_bytes_before_somebody_else_took_them
try:
    Segment.create("shmq-test-big", 4 << 20)
except SegmentSpaceError as error:
    assert f"{2 << 20:,} bytes free" in str(error), error
else:
    sys.exit("not refused")
assert os.listdir("/dev/shm") == [] and segment.free_bytes() == 2 << 20

ring = Segment.create("shmq-test-ring", 1 << 20)
writer = RingWriter(ring, spill_limit=8 << 20)
reader = RingReader(Segment.attach("shmq-test-ring"), epoch=1)
refused(lambda: writer.reserve(3 << 20))
first = writer.reserve(writer.max_payload + 1)
writer.let_go(first)
second = writer.reserve(900_000)
assert second is not None and second.spill.number != first.spill.number, "an idle spill segment has to make room"
assert writer.post(b"still at work", 0, 0) == 0
assert reader.take()[4] == b"still at work"
writer.close(remove=True)
reader.close()
assert os.listdir("/dev/shm") == [] and segment.free_bytes() == 2 << 20
print("done")
"""


def test_a_full_directory_is_a_typed_error_and_the_ring_goes_on() -> None:
    namespace = ["unshare", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=2m tmpfs /dev/shm"
    try:
        probe = subprocess.run([*namespace, mount], capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if probe.returncode:
        pytest.skip(f"a mount namespace of its own is not permitted here: {probe.stderr.strip()}")
    result = subprocess.run(
        [*namespace, f'{mount} && exec "$0" -c "$1"', sys.executable, IN_A_TINY_DIRECTORY],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


# -- attaching --------------------------------------------------------------------------------------------------------


@contextmanager
def file_of(name: str, content: bytes, size: int | None = None) -> Iterator[None]:
    with open(path(name), "xb") as file:
        file.write(content)
        file.truncate(len(content) if size is None else size)
    try:
        yield
    finally:
        os.unlink(path(name))


def test_attaching_what_is_not_there_is_an_error(make_name: MakeName) -> None:
    name = make_name()
    with pytest.raises(SegmentMissingError, match=name):
        Segment.attach(name)


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 8192,
        b"somebody else's " * 1024,
        b"SHMQRINK" + b"\1" * 8184,
        b"odd" * 2001,
    ],
)
def test_attaching_a_file_of_somebody_else_is_an_error_and_leaves_it_alone(make_name: MakeName, content: bytes) -> None:
    name = make_name()
    before = descriptors()
    with file_of(name, content):
        with pytest.raises(ForeignSegmentError, match=name):
            Segment.attach(name)
        with open(path(name), "rb") as file:
            assert file.read() == content
    assert descriptors() == before


@pytest.mark.parametrize("size", [0, 1, 8, layout.HEADER_BYTES - 1])
def test_attaching_what_is_shorter_than_a_header_is_an_error(make_name: MakeName, owned: Segment, size: int) -> None:
    name = make_name()
    with (
        file_of(name, bytes(owned.memory[:size])),
        pytest.raises(TruncatedSegmentError, match=f"{size} bytes"),
    ):
        Segment.attach(name)


@pytest.mark.parametrize(
    "missing",
    [
        8,
        layout.PAGE,
        SIZE,
        -layout.PAGE,
        1,
        SIZE - 1,
        -1,
    ],
)
def test_attaching_a_segment_of_another_size_than_it_says_is_an_error(
    make_name: MakeName, owned: Segment, missing: int
) -> None:
    name = make_name()
    size = owned.size - missing
    with (
        file_of(name, bytes(owned.memory)[:size], size),
        pytest.raises(TruncatedSegmentError, match=f"{size} bytes.*{owned.size}"),
    ):
        Segment.attach(name)


def test_attaching_a_segment_of_another_layout_is_an_error_that_names_both_versions(owned: Segment) -> None:
    owned.words[layout.LAYOUT_VERSION] = 77
    with pytest.raises(LayoutVersionError, match=f"77.*{layout.VERSION}"):
        Segment.attach(owned.name)


def test_attaching_a_segment_with_another_header_size_is_an_error(owned: Segment) -> None:
    owned.words[layout.HEADER_SIZE] = 2 * layout.HEADER_BYTES
    with pytest.raises(LayoutVersionError):
        Segment.attach(owned.name)


def test_a_spill_segment_is_no_ring_and_a_ring_is_no_spill_segment(make_name: MakeName, owned: Segment) -> None:
    spill = Segment.create(make_name(), SIZE, magic=layout.SPILL_MAGIC)
    try:
        with pytest.raises(ForeignSegmentError, match="no shmq ring"):
            Segment.attach(spill.name)
        with pytest.raises(ForeignSegmentError, match="no shmq spill segment"):
            Segment.attach(owned.name, magic=layout.SPILL_MAGIC)
        Segment.attach(spill.name, magic=layout.SPILL_MAGIC).close()
    finally:
        segment.unlink(spill.name)
        spill.close()


def test_attaching_a_directory_is_a_typed_error(make_name: MakeName) -> None:
    name = make_name()
    os.mkdir(path(name))
    try:
        with pytest.raises(SegmentError):
            Segment.attach(name)
    finally:
        os.rmdir(path(name))


def test_attaching_a_large_sparse_file_of_somebody_else_allocates_nothing(make_name: MakeName) -> None:
    name = make_name()
    with file_of(name, b"not ours", 256 * 1024 * 1024):
        with pytest.raises(ForeignSegmentError):
            Segment.attach(name)
        allocated = os.stat(path(name)).st_blocks * 512
    assert allocated <= 2 * layout.PAGE


def as_nobody(call: Callable[[], object]) -> str:
    """The name of the type of what ``call`` raised as another user; 'typed' for a ShmqError."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = "nothing"
        try:
            os.setuid(65534)
            call()
        except ShmqError:
            outcome = "typed"
        except BaseException as error:
            outcome = type(error).__name__
        finally:
            os.write(send, outcome.encode())
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        outcome = pipe.read().decode()
    os.waitpid(pid, 0)
    return outcome


def test_a_segment_of_another_user_is_a_typed_error(owned: Segment) -> None:
    assert as_nobody(lambda: Segment.attach(owned.name)) == "typed"


def test_removing_a_segment_of_another_user_is_a_typed_error(owned: Segment) -> None:
    assert as_nobody(lambda: segment.unlink(owned.name)) == "typed"


def test_a_process_that_attaches_and_exits_leaves_the_segment_there_and_says_nothing(owned: Segment) -> None:
    result = python(
        """
        import multiprocessing, multiprocessing.resource_tracker, sys
        multiprocessing.resource_tracker.ensure_running()
        from shmq import RingReader, Segment
        reader = RingReader(Segment.attach(sys.argv[1]), epoch=1)
        assert reader.take() is None
        """,
        owned.name,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert segment.names(owned.name) == [owned.name]
    assert owned.is_linked()


def test_an_owner_that_exits_without_closing_leaves_the_segment_there_and_says_nothing(make_name: MakeName) -> None:
    name = make_name()
    result = python("import sys; from shmq import Segment; made = Segment.create(sys.argv[1], 65536)", name)
    left = segment.names(name)
    segment.unlink(name)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert left == [name]


# -- the owner's lock -------------------------------------------------------------------------------------------------

OWNER = """
import sys
from shmq import Segment
owned = Segment.create(sys.argv[1], 65536)
print("made", flush=True)
sys.stdin.read()
"""

OWNER_WITH_A_CHILD = """
import os, sys
from shmq import Segment
owned = Segment.create(sys.argv[1], 65536)
pid = os.fork()
if pid == 0:
    sys.stdin.read()
    os._exit(0)
print(pid, flush=True)
sys.stdin.read()
"""


def test_only_the_death_of_the_owner_lets_another_process_adopt(make_name: MakeName) -> None:
    name = make_name()
    with running(OWNER, name) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "made\n"
        attached = Segment.attach(name)
        another = Segment.attach(name)
        assert not attached.adopt()
        os.kill(owner.pid, signal.SIGSTOP)
        assert not attached.adopt()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        assert attached.adopt()
        assert attached.adopt()
        assert not another.adopt()
        attached.close()
        assert another.adopt()
        another.close()
    segment.unlink(name)


def test_a_child_that_the_owner_forked_does_not_keep_the_lock(make_name: MakeName) -> None:
    name = make_name()
    with running(OWNER_WITH_A_CHILD, name) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        attached = Segment.attach(name)
        assert not attached.adopt()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        try:
            assert until(attached.adopt)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
        attached.close()
    segment.unlink(name)


def test_a_program_that_the_owner_started_does_not_keep_the_lock(owned: Segment) -> None:
    with subprocess.Popen(["sleep", "60"], close_fds=False) as program:
        attached = Segment.attach(owned.name)
        assert not attached.adopt()
        owned.drop_lock()
        assert attached.adopt()
        assert program.poll() is None
        program.kill()
        attached.close()


def test_a_child_that_was_forked_while_attached_does_not_keep_an_adopted_lock(owned: Segment) -> None:
    adopter = Segment.attach(owned.name)
    owned.drop_lock()
    assert adopter.adopt()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(send)
        os.read(receive, 1)
        os._exit(0)
    os.close(receive)
    try:
        adopter.close()
        another = Segment.attach(owned.name)
        assert until(another.adopt)
        another.close()
    finally:
        os.close(send)
        os.waitpid(pid, 0)


def test_a_closed_segment_adopts_nothing(owned: Segment) -> None:
    attached = Segment.attach(owned.name)
    owned.drop_lock()
    attached.close()
    assert not attached.adopt()
    assert not attached.is_linked()


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_gives_back_mapping_and_descriptors_and_can_be_repeated(make_name: MakeName) -> None:
    before = descriptors()
    made = Segment.create(make_name(), SIZE)
    attached = Segment.attach(made.name)
    assert is_mapped(made.name)
    for each in (attached, made):
        each.close()
        each.close()
    assert descriptors() == before
    assert not is_mapped(made.name)
    assert segment.unlink(made.name)


def test_closing_with_live_views_is_an_error_and_everything_stays_usable(owned: Segment) -> None:
    attached = Segment.attach(owned.name)
    view = np.frombuffer(attached.memory, np.uint8, 100, layout.HEADER_BYTES)
    part = view[10:20]
    del view
    with pytest.raises(ViewsHeldError, match=owned.name):
        attached.close()
    attached.words[layout.HEADER_BYTES // 8 + 1] = 0x0101010101010101
    attached.memory[layout.HEADER_BYTES + 16 : layout.HEADER_BYTES + 20] = b"\2\2\2\2"
    assert part.tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert attached.is_linked()
    owned.drop_lock()
    assert attached.adopt()
    del part
    attached.close()
    with pytest.raises(ValueError, match="closed"):
        attached.memory[0]


def test_a_retired_segment_is_unmapped_with_its_last_view(owned: Segment) -> None:
    attached = Segment.attach(owned.name)
    owned.memory[layout.HEADER_BYTES] = 42
    view = np.frombuffer(attached.memory, np.uint8, 100, layout.HEADER_BYTES)
    segment.unlink(owned.name)
    owned.close()
    attached.retire()
    attached.retire()
    assert view[0] == 42
    assert is_mapped(attached.name)
    name = attached.name
    del attached
    assert view[0] == 42
    del view
    assert not is_mapped(name)


def test_a_retired_segment_gives_up_its_lock_at_once(owned: Segment) -> None:
    view = np.frombuffer(owned.memory, np.uint8, 100, layout.HEADER_BYTES)
    attached = Segment.attach(owned.name)
    owned.retire()
    assert attached.adopt()
    assert view.size == 100
    attached.close()


def test_a_segment_knows_whether_it_still_has_its_name(make_name: MakeName) -> None:
    made = Segment.create(make_name(), SIZE)
    attached = Segment.attach(made.name)
    assert made.is_linked()
    assert attached.is_linked()
    assert segment.unlink(made.name) is True
    assert segment.unlink(made.name) is False
    assert not made.is_linked()
    assert not attached.is_linked()
    attached.close()
    made.close()


def test_names_lists_the_segments_that_begin_with_a_prefix_in_order(make_name: MakeName) -> None:
    prefix = make_name()
    made = [Segment.create(f"{prefix}.{number}", SIZE) for number in (3, 1, 2)]
    found = segment.names(prefix)
    for each in made:
        segment.unlink(each.name)
        each.close()
    assert found == [f"{prefix}.1", f"{prefix}.2", f"{prefix}.3"]
    assert segment.names(prefix) == []


def test_the_representation_of_a_segment_names_it_and_its_size(owned: Segment) -> None:
    assert repr(owned) == f"<Segment {owned.name} of {owned.size} bytes>"
