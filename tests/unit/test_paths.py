"""Names, directories and the lock of a queue."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fmq import FmqError, QueueInUseError, QueueNameError
from fmq.paths import QueueLock, QueuePath, consumer_is_alive, default_runtime_dir
from tests.queues import Place, place_fixture  # noqa: F401

BAD_NAMES = ["", "a/b", "/", "..", ".hidden", "-a", "a" * 65, "ä", "a b", "a:b", "a\n", "a\0", None, b"a", 7]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_what_cannot_name_a_queue_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(QueueNameError, match="1 to 64 letters") as caught:
        QueuePath(name, "namespace", "/tmp/x")
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name is not None], ids=repr)
def test_what_cannot_name_a_namespace_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(QueueNameError, match="can't name a namespace"):
        QueuePath("queue", name, "/tmp/x")


@pytest.mark.parametrize("name", ["a", "A9_", "a" * 64, "a.b-c_d", "_", "0"])
def test_letters_digits_and_three_signs_can_name_a_queue(name: str) -> None:
    path = QueuePath(name, name[:8], "/tmp/x")
    assert path.socket == f"/tmp/x/{name[:8]}/{name}.sock"
    assert path.lock == f"/tmp/x/{name[:8]}/{name}.lock"
    assert path.rings == f"shmq:{name[:8]}:{name}:"


def test_a_socket_path_too_long_is_refused_with_both_numbers() -> None:
    longest = 107 - len("/n/q.sock")
    assert len(QueuePath("q", "n", "/" + "x" * (longest - 1)).socket) == 107
    with pytest.raises(QueueNameError, match=r"has 108 bytes, and a unix socket takes 107; .*FMQ_RUNTIME_DIR"):
        QueuePath("q", "n", "/" + "x" * longest)


def test_the_length_of_a_socket_path_is_counted_in_bytes() -> None:
    with pytest.raises(QueueNameError, match="has 127 bytes"):
        QueuePath("q", "n", "/" + "ä" * 58 + "x")


def test_the_namespace_comes_from_the_environment_if_nobody_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMQ_NAMESPACE", raising=False)
    assert QueuePath("q", None, "/tmp/x").namespace == "default"
    monkeypatch.setenv("FMQ_NAMESPACE", "")
    assert QueuePath("q", None, "/tmp/x").namespace == "default"
    monkeypatch.setenv("FMQ_NAMESPACE", "blue")
    assert QueuePath("q", None, "/tmp/x").namespace == "blue"
    assert QueuePath("q", "green", "/tmp/x").namespace == "green"
    monkeypatch.setenv("FMQ_NAMESPACE", "../up")
    with pytest.raises(QueueNameError, match="namespace"):
        QueuePath("q", None, "/tmp/x")


def test_the_runtime_directory_is_the_first_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMQ_RUNTIME_DIR", "/run/mine")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert QueuePath("q", "n", "/run/given").directory == "/run/given/n"
    assert QueuePath("q", "n").directory == "/run/mine/n"
    monkeypatch.delenv("FMQ_RUNTIME_DIR")
    assert default_runtime_dir() == "/run/user/7/fmq"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", "/other/tmp")
    assert default_runtime_dir() == f"/other/tmp/fmq-{os.getuid()}"


def test_the_directories_are_made_for_this_user_alone_whatever_the_umask(place: Place) -> None:
    before = os.umask(0)
    try:
        place.path.make_directory()
    finally:
        os.umask(before)
    for directory in (place.runtime, place.path.directory):
        assert stat.S_IMODE(os.stat(directory).st_mode) & 0o077 == 0, directory
    place.path.make_directory()
    place.path.tidy()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("which", ["runtime", "namespace"])
def test_a_directory_that_others_may_write_to_is_refused(place: Place, mode: int, which: str) -> None:
    place.path.make_directory()
    directory = place.runtime if which == "runtime" else place.path.directory
    os.chmod(directory, mode)
    with pytest.raises(FmqError, match=f"mode {mode:04o}; remove it, or set FMQ_RUNTIME_DIR") as caught:
        place.consumer()
    assert directory in str(caught.value)
    with pytest.raises(FmqError, match=f"{mode:04o}"):
        place.producer()
    place.path.tidy()


def test_a_directory_of_another_user_is_refused_with_both_user_ids(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.path.make_directory()
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(FmqError, match=f"directory of user {mine + 1} .* belongs to user {mine} "):
        place.path.make_directory()
    place.path.tidy()


@pytest.mark.parametrize("which", ["runtime", "namespace"])
def test_a_file_in_the_place_of_a_directory_is_refused(place: Place, which: str) -> None:
    if which == "namespace":
        os.mkdir(place.runtime, 0o700)
    file = Path(place.runtime if which == "runtime" else place.path.directory)
    file.write_bytes(b"not ours")
    with pytest.raises(FmqError, match=r"has to be a directory|can't be made"):
        place.consumer()
    assert file.read_bytes() == b"not ours"
    file.unlink()


def test_a_directory_that_cannot_be_made_is_a_typed_error() -> None:
    with pytest.raises(FmqError):
        QueuePath("q", "n", "/proc/nothing").make_directory()


def test_a_directory_whose_parent_is_tidied_away_while_it_is_made_is_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, tidied = os.mkdir, []

    def after_another_has_left(path: str, mode: int = 0o777) -> None:
        if path == place.path.directory and not tidied:
            tidied.append(path)
            place.path.tidy()
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", after_another_has_left)
    place.path.make_directory()
    assert tidied
    assert os.path.isdir(place.path.directory)
    place.path.tidy()


def test_tidying_removes_empty_directories_and_nothing_else(place: Place) -> None:
    path = place.path
    path.make_directory()
    other = Path(place.runtime, "other.sock")
    other.touch()
    path.tidy()
    assert not os.path.exists(path.directory)
    assert other.exists()
    other.unlink()
    path.tidy()
    assert not os.path.exists(place.runtime)
    path.tidy()


def test_the_second_lock_is_refused_with_the_pid_of_the_first(place: Place) -> None:
    first, second = QueueLock(place.path), QueueLock(place.path)
    first.acquire()
    with pytest.raises(QueueInUseError, match=rf"queue {place.queue} .* process {os.getpid()};.*NAMESPACE") as caught:
        second.acquire()
    assert caught.value.pid == os.getpid()
    first.release()
    second.acquire()
    second.release()
    place.path.tidy()


def test_a_lock_file_whose_holder_wrote_nothing_readable_is_in_use_by_nobody_known(place: Place) -> None:
    first, second = QueueLock(place.path), QueueLock(place.path)
    first.acquire()
    for content in (b"", b"not a pid", b"\xff" * 40):
        Path(place.path.lock).write_bytes(content)
        with pytest.raises(QueueInUseError, match="process unknown") as caught:
            second.acquire()
        assert caught.value.pid is None
    first.release()
    place.path.tidy()


def test_a_lock_file_that_a_dead_process_left_is_taken_over(place: Place) -> None:
    place.path.make_directory()
    Path(place.path.lock).write_bytes(b"4194304 and some more")
    assert not consumer_is_alive(place.path)
    lock = QueueLock(place.path)
    lock.acquire()
    assert Path(place.path.lock).read_bytes() == str(os.getpid()).encode()
    assert consumer_is_alive(place.path)
    lock.release()
    place.path.tidy()


def test_releasing_a_lock_removes_its_file_and_can_be_done_twice(place: Place) -> None:
    lock = QueueLock(place.path)
    lock.acquire()
    lock.release()
    assert not os.path.exists(place.path.lock)
    lock.release()
    assert not consumer_is_alive(place.path)
    place.path.tidy()


def test_whoever_asks_for_a_consumer_does_not_keep_one_away(place: Place) -> None:
    asked = QueueLock(place.path)
    asked.acquire()
    asked.release()
    for _ in range(100):
        assert not consumer_is_alive(place.path)
    asked.acquire()
    for _ in range(100):
        assert consumer_is_alive(place.path)
    asked.release()
    place.path.tidy()
