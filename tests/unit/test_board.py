from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from shmq import Board, ForeignSegmentError, Segment, SegmentExistsError, SegmentMissingError, collect
from shmq.segment import names, unlink

MakeName = Callable[[], str]

OWNER = """
import sys
from shmq import Board
board = Board.create(sys.argv[1], 2)
board[1] = 7
print("made", flush=True)
sys.stdin.read()
"""


def owner(name: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_its_owner_stores_all_others_load(make_name: MakeName) -> None:
    board = Board.create(make_name(), 3)
    reader = Board.attach(board.name)
    assert (len(board), len(reader), reader.pid) == (3, 3, os.getpid())
    assert [reader[index] for index in range(3)] == [0, 0, 0]
    board[2] = 2**64 + 5
    assert reader[2] == 5
    with pytest.raises(IndexError):
        reader[3]
    reader.close()
    assert board.is_current()
    board.close()
    board.close()
    assert names(board.name) == []


def test_a_board_of_a_process_that_lives_is_not_replaced(make_name: MakeName) -> None:
    board = Board.create(make_name(), 1)
    with pytest.raises(SegmentExistsError, match="another process's, which lives"):
        Board.create(board.name, 1)
    board.close()
    with pytest.raises(SegmentMissingError):
        Board.attach(board.name)


def test_the_board_of_a_stopped_process_is_current_that_of_a_dead_one_is_not(make_name: MakeName) -> None:
    name = make_name()
    process = owner(name)
    reader = Board.attach(name)
    process.send_signal(signal.SIGSTOP)
    assert reader.is_current()
    kill(process)
    assert not reader.is_current()
    # What was stored last can still be seen, and another one takes its place.
    assert reader[1] == 7
    successor = Board.create(name, 1)
    assert not reader.is_current()
    reader.close()
    assert successor.is_current()
    assert names(name) == [name]
    successor.close()


def test_the_board_of_a_dead_process_is_collected_and_no_other(make_name: MakeName) -> None:
    name = make_name()
    process = owner(name)
    assert collect(name) == []
    kill(process)
    (finding,) = collect(name)
    assert (finding.name, finding.removed, finding.reason) == (name, True, "its owner is dead")
    assert names(name) == []


def test_a_ring_is_no_board(make_name: MakeName) -> None:
    ring = Segment.create(make_name(), 64 * 1024)
    with pytest.raises(ForeignSegmentError, match="board"):
        Board.attach(ring.name)
    unlink(ring.name)
    ring.close()


def test_a_forked_child_leaves_the_board_to_its_parent(make_name: MakeName) -> None:
    board = Board.create(make_name(), 1)
    pid = os.fork()
    if pid == 0:
        board.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert board.is_current()
    board.close()
