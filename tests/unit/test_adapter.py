"""The way into the engine by plain ZeroMQ sockets, over the loopback."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from engine.adapter import Adapter
from engine.errors import AdapterError
from fmq.calls import Abort, Answer, Call, Control, Events, Failure, Output, Request
from tests.queues import DEADLINE_S, eventually, open_descriptors

CODECS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "json": (msgspec.json.encode, msgspec.json.decode),
    "msgpack": (msgspec.msgpack.encode, msgspec.msgpack.decode),
}
GARBAGE = {
    "nothing": [b""],
    "no msgpack": [b"\xff\xfe\x00"],
    "half of JSON": [b'{"request_id": "r", "command": "c"'],
    "no id and no command": [b"{}"],
    "a list": [b"[]"],
    "an id and a command that are none": [b'{"request_id": 1, "command": 1}'],
    "no UTF-8": [b'{"request_id": "\xff", "command": "\xff"}'],
    "a key that can't be one": [b"\x81\x81\x01\x01\x01"],
    "three frames": [b"", b"{}", b"{}"],
    "a frame before it": [b"x", b'{"request_id": "r", "command": "c"}'],
}


class Desk:
    """An adapter, the calls that it hands on, and the sockets of those who talk to it."""

    def __init__(self) -> None:
        self.adapter = Adapter()
        self.calls: queue.Queue[tuple[Call, str]] = queue.Queue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._boss = self.socket(zmq.DEALER, self.adapter.control_port)
        self.adapter.start(lambda call, address: self.calls.put((call, address)))

    def socket(self, kind: int, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        socket.connect(f"tcp://127.0.0.1:{port}")
        self._sockets.append(socket)
        return socket

    def sender(self) -> zmq.Socket[bytes]:
        return self.socket(zmq.PUSH, self.adapter.requests_port)

    def asker(self, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        return self.socket(kind, self.adapter.results_port)

    def boss(self, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        return self.socket(kind, self.adapter.control_port)

    def call(self) -> tuple[Call, str]:
        """The next call, and its address."""
        return self.calls.get(timeout=DEADLINE_S)

    def request(self, body: dict[str, Any], codec: str = "json") -> tuple[Request, str]:
        """Send a request, and return what it was handed on as."""
        socket = self.sender()
        socket.send(CODECS[codec][0](body))
        call, address = self.call()
        assert isinstance(call, Request)
        return call, address

    def say(self, address: str, *outputs: Output) -> None:
        """Let the engine have results for one address."""
        self.adapter.send(address, Events(list(outputs)), lambda: None)

    def answer(self, address: str, value: Any, failure: Failure | None = None) -> None:
        self.adapter.send(address, Events([], [Answer(address, value, failure)]), lambda: None)

    def catch_up(self) -> None:
        """Wait until the adapter has done what it was given before. No other call may be on its way."""
        self._boss.send_multipart([b"", b'{"command": "catch up"}'])
        call, address = self.call()
        assert isinstance(call, Control)
        assert call.command == "catch up"
        self.answer(address, "done")
        assert self._boss.recv_multipart() == [b"", b'{"value":"done"}']

    def close(self) -> None:
        self.adapter.close()
        self._context.destroy(linger=0)


@pytest.fixture(name="desk")
def desk_fixture() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def heard(socket: zmq.Socket[bytes], codec: str = "json") -> list[tuple[str, int, int, Any]]:
    """The next message of an asker: id, choice, step and value of each output in it."""
    empty, body = socket.recv_multipart()
    assert empty == b""
    outputs = CODECS[codec][1](body)
    return [(output["request_id"], output["choice"], output["step"], output["value"]) for output in outputs]


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_request_needs_a_name_and_a_task_and_no_more(desk: Desk, codec: str) -> None:
    task = {"text": "hello", "numbers": [1, 2.5, None, True]}
    request, address = desk.request({"request_id": "r1", "task": task}, codec)
    assert request == Request("r1", address, task, 1, 0)
    assert address == "r1"


@pytest.mark.parametrize("codec", CODECS)
def test_a_request_has_choices_and_a_timeout_from_now_if_it_likes(desk: Desk, codec: str) -> None:
    before = time.monotonic_ns()
    request, _ = desk.request({"request_id": "r1", "task": 1, "choices": 3, "timeout": 2.5}, codec)
    assert request.choices == 3
    assert before + 2_500_000_000 <= request.deadline_ns <= time.monotonic_ns() + 2_500_000_000


def test_bytes_come_as_bytes_in_msgpack(desk: Desk) -> None:
    request, _ = desk.request({"request_id": "r1", "task": {"blob": b"\x00\xff"}}, "msgpack")
    assert request.task == {"blob": b"\x00\xff"}


@pytest.mark.parametrize("codec", CODECS)
def test_an_abort_is_handed_on_with_the_address_of_its_request(desk: Desk, codec: str) -> None:
    _, address = desk.request({"request_id": "r1", "task": 1})
    desk.sender().send(CODECS[codec][0]({"request_id": "r1", "abort": True}))
    assert desk.call() == (Abort("r1", "r1"), address)


def test_requests_of_one_sender_come_in_their_order(desk: Desk) -> None:
    sender = desk.sender()
    names = [f"r{index}" for index in range(200)]
    for name in names:
        sender.send(json.dumps({"request_id": name}).encode())
    assert [desk.call()[1] for _ in names] == names


@pytest.mark.parametrize("timeout", [0, -1, 1e9])
def test_a_timeout_that_is_none_is_passed_over(desk: Desk, timeout: float) -> None:
    sender = desk.sender()
    sender.send(json.dumps({"request_id": "bad", "timeout": timeout}).encode())
    sender.send(b'{"request_id": "good"}')
    assert desk.call()[1] == "good"
    assert desk.adapter.errors == 1


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_whoever_asks_gets_all_that_an_output_has_in_the_encoding_of_the_request(desk: Desk, codec: str) -> None:
    _, address = desk.request({"request_id": "r1"}, codec)
    asker = desk.asker()
    asker.send_multipart([b"", b"r1"])
    desk.say(address, Output("r1", 0, 0, {"a": np.array([1, 2], np.uint8), "b": np.float32(0.5)}))
    array = {"dtype": "uint8", "shape": [2], "data": "AQI=" if codec == "json" else b"\x01\x02"}
    _, body = asker.recv_multipart()
    assert CODECS[codec][1](body) == [
        {
            "request_id": "r1",
            "choice": 0,
            "step": 0,
            "value": {"a": array, "b": 0.5},
            "finished": True,
            "failure": None,
        }
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_a_failure_says_its_kind_and_its_reason(desk: Desk, codec: str) -> None:
    _, address = desk.request({"request_id": "r1"}, codec)
    asker = desk.asker()
    asker.send(b"r1")
    desk.say(address, Output("r1", 0, 4, None, True, Failure("deadline", "its time is over")))
    (output,) = CODECS[codec][1](asker.recv_multipart()[1])
    assert output["failure"] == {"kind": "deadline", "message": "its time is over"}
    assert (output["step"], output["finished"], output["value"]) == (4, True, None)


@pytest.mark.parametrize("frames", [[b"r1"], [b"", b"r1"]], ids=["one frame", "an empty frame before it"])
def test_a_dealer_that_asks_once_gets_every_step_in_order_as_it_comes(desk: Desk, frames: list[bytes]) -> None:
    _, address = desk.request({"request_id": "r1"})
    asker = desk.asker()
    asker.send_multipart(frames)
    for step in range(3):
        desk.say(address, Output("r1", 0, step, f"step {step}", step == 2))
        # What has come shows that it was asked for: the next one is no early one.
        assert heard(asker) == [("r1", 0, step, f"step {step}")]


def test_a_req_gets_the_result_that_it_waits_for(desk: Desk) -> None:
    _, address = desk.request({"request_id": "r1"})
    asker = desk.asker(zmq.REQ)
    asker.send(b"r1")
    eventually(lambda: desk.adapter._asked["r1"].identity, "the adapter knows who asks")
    desk.say(address, Output("r1", 0, 0, "done"))
    assert [output["value"] for output in json.loads(asker.recv())] == ["done"]


def test_a_req_gets_a_result_that_was_there_before_it_asked(desk: Desk) -> None:
    _, address = desk.request({"request_id": "r1"}, "msgpack")
    desk.say(address, Output("r1", 0, 0, b"done"))
    desk.catch_up()
    asker = desk.asker(zmq.REQ)
    asker.send(b"r1")
    assert [output["value"] for output in msgspec.msgpack.decode(asker.recv())] == [b"done"]


def test_results_that_nobody_has_asked_for_are_kept_in_order_and_go_on_once_somebody_has(desk: Desk) -> None:
    _, address = desk.request({"request_id": "r1"})
    for step in range(3):
        desk.say(address, Output("r1", 0, step, step, False))
    desk.catch_up()
    asker = desk.asker()
    asker.send(b"r1")
    assert [heard(asker) for _ in range(3)] == [[("r1", 0, step, step)] for step in range(3)]
    desk.say(address, Output("r1", 0, 3, "last"))
    assert heard(asker) == [("r1", 0, 3, "last")]


@pytest.mark.parametrize("codec", CODECS)
def test_one_may_ask_before_the_request_is_sent(desk: Desk, codec: str) -> None:
    asker = desk.asker()
    asker.send(b"r1")
    eventually(lambda: "r1" in desk.adapter._asked, "the adapter knows who asks")
    _, address = desk.request({"request_id": "r1"}, codec)
    desk.say(address, Output("r1", 0, 0, "done"))
    assert heard(asker, codec) == [("r1", 0, 0, "done")]


def test_outputs_of_one_step_come_in_one_message(desk: Desk) -> None:
    _, address = desk.request({"request_id": "r1", "choices": 2})
    asker = desk.asker()
    asker.send(b"r1")
    desk.say(address, Output("r1", 0, 0, "a"), Output("r1", 1, 0, "b"))
    assert heard(asker) == [("r1", 0, 0, "a"), ("r1", 1, 0, "b")]


def test_a_request_of_several_choices_is_over_with_the_last_of_them(desk: Desk) -> None:
    _, address = desk.request({"request_id": "r1", "choices": 3})
    asker = desk.asker()
    asker.send(b"r1")
    for choice in (2, 0, 1):
        desk.say(address, Output("r1", choice, 0, choice))
        assert heard(asker) == [("r1", choice, 0, choice)]


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_name_can_be_used_again_by_somebody_else_once_its_request_is_over(desk: Desk, asks_first: bool) -> None:
    first, second = desk.asker(), desk.asker()
    _, address = desk.request({"request_id": "r1"})
    if asks_first:
        first.send(b"r1")
        eventually(lambda: desk.adapter._asked["r1"].identity, "the adapter knows who asks")
    desk.say(address, Output("r1", 0, 0, "one"))
    desk.catch_up()
    if not asks_first:
        first.send(b"r1")
    assert heard(first) == [("r1", 0, 0, "one")]
    _, address = desk.request({"request_id": "r1"})
    desk.say(address, Output("r1", 0, 0, "two"))
    desk.catch_up()
    second.send(b"r1")
    assert heard(second) == [("r1", 0, 0, "two")]
    assert first.poll(0) == 0


def test_everybody_gets_the_results_of_what_they_asked_for(desk: Desk) -> None:
    askers = {name: desk.asker() for name in ("r1", "r2", "r3")}
    for name, asker in askers.items():
        desk.request({"request_id": name})
        asker.send(name.encode())
    for name in reversed(askers):
        desk.say(name, Output(name, 0, 0, f"{name}'s"))
    for name, asker in askers.items():
        assert heard(asker) == [(name, 0, 0, f"{name}'s")]
    desk.catch_up()
    assert [asker.poll(0) for asker in askers.values()] == [0, 0, 0]


def test_one_who_is_gone_does_not_keep_others_from_their_results(desk: Desk) -> None:
    for name in ("gone", "here"):
        desk.request({"request_id": name})
    gone, here = desk.asker(), desk.asker()
    gone.send(b"gone")
    here.send(b"here")
    desk.say("gone", Output("gone", 0, 0, "a", False))
    assert heard(gone) == [("gone", 0, 0, "a")]
    gone.close()
    for step in range(1, 20):
        desk.say("gone", Output("gone", 0, step, "b", False))
    desk.say("here", Output("here", 0, 0, "c"))
    assert heard(here) == [("here", 0, 0, "c")]


def test_of_too_many_requests_the_results_of_the_oldest_are_forgotten(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.adapter._KEPT_REQUESTS", 2)
    names = ["oldest", "newer", "newest"]
    for name in names:
        desk.request({"request_id": name})
        desk.say(name, Output(name, 0, 0, name))
    desk.catch_up()
    asker = desk.asker()
    for name in ("newest", "newer", "oldest"):
        asker.send(name.encode())
    assert [heard(asker), heard(asker)] == [[("newest", 0, 0, "newest")], [("newer", 0, 0, "newer")]]
    eventually(lambda: "oldest" in desk.adapter._asked, "the adapter was asked for the oldest")
    desk.say("oldest", Output("oldest", 0, 1, "begun anew"))
    assert heard(asker) == [("oldest", 0, 1, "begun anew")]


def test_results_are_settled_as_soon_as_they_are_sent_and_nobody_is_known_to_be_gone(desk: Desk) -> None:
    settled: list[str] = []
    desk.adapter.send("r1", Events([Output("r1", 0, 0, 1)]), lambda: settled.append("r1"))
    assert settled == ["r1"]
    assert desk.adapter.turn() == []


# -- control ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER], ids=["REQ", "DEALER"])
def test_a_command_is_handed_on_with_its_arguments_and_answered_in_its_encoding(
    desk: Desk, codec: str, kind: int
) -> None:
    encode, decode = CODECS[codec]
    boss = desk.boss(kind)
    boss.send(encode({"command": "resize", "arguments": {"to": 3}}))
    call, address = desk.call()
    assert isinstance(call, Control)
    assert (call.command, call.arguments, call.reply_to) == ("resize", {"to": 3}, address)
    desk.answer(address, {"was": np.int32(2)})
    assert decode(boss.recv_multipart()[-1]) == {"value": {"was": 2}}
    boss.send(encode({"command": "again"}))
    call, address = desk.call()
    assert isinstance(call, Control)
    assert call.arguments == {}
    desk.answer(address, None, Failure("invalid", "there is no command"))
    assert decode(boss.recv_multipart()[-1]) == {"failure": {"kind": "invalid", "message": "there is no command"}}


def test_every_command_is_answered_to_whoever_gave_it(desk: Desk) -> None:
    bosses = [desk.boss(zmq.REQ) for _ in range(3)]
    addresses = []
    for boss in bosses:
        boss.send(b'{"command": "ping"}')
        addresses.append(desk.call()[1])
    assert len(set(addresses)) == 3
    for index in (2, 0, 1):
        desk.answer(addresses[index], index)
    assert [json.loads(boss.recv()) for boss in bosses] == [{"value": 0}, {"value": 1}, {"value": 2}]


@pytest.mark.parametrize("codec", CODECS)
def test_an_answer_that_has_no_plain_form_is_a_failure(desk: Desk, codec: str) -> None:
    encode, decode = CODECS[codec]
    boss = desk.boss(zmq.REQ)
    boss.send(encode({"command": "odd"}))
    desk.answer(desk.call()[1], object())
    failure = decode(boss.recv())["failure"]
    assert failure["kind"] == "handler"
    assert "a object has no plain form" in failure["message"]


# -- what is none of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_request_that_is_none_is_counted_and_passed_over(desk: Desk, frames: list[bytes]) -> None:
    sender = desk.sender()
    for count in (1, 2):
        sender.send_multipart(frames)
        sender.send(b'{"request_id": "good"}')
        assert desk.call()[1] == "good"
        assert desk.adapter.errors == count


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_command_that_is_none_is_counted_and_passed_over(desk: Desk, frames: list[bytes]) -> None:
    boss = desk.boss()
    boss.send_multipart(frames)
    boss.send(b'{"command": "good"}')
    call, address = desk.call()
    assert isinstance(call, Control)
    assert call.command == "good"
    assert desk.adapter.errors == 1
    desk.answer(address, 1)
    assert json.loads(boss.recv_multipart()[-1]) == {"value": 1}


@pytest.mark.parametrize("frames", [[b"\xff"], [b"a", b"b"], [b"", b"a", b"b"]], ids=["no UTF-8", "two", "three"])
def test_a_name_that_is_none_is_counted_and_passed_over(desk: Desk, frames: list[bytes]) -> None:
    _, address = desk.request({"request_id": "r1"})
    asker = desk.asker()
    asker.send_multipart(frames)
    asker.send(b"r1")
    desk.say(address, Output("r1", 0, 0, "done"))
    assert heard(asker) == [("r1", 0, 0, "done")]
    assert desk.adapter.errors == 1


def test_a_flood_of_garbage_is_counted_in_full_and_told_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    sender = desk.sender()
    for _ in range(50):
        sender.send(b"garbage")
    sender.send(b'{"request_id": "good"}')
    assert desk.call()[1] == "good"
    assert desk.adapter.errors == 50
    told = [record.getMessage() for record in caplog.records if "was passed over" in record.getMessage()]
    assert 1 <= len(told) < 50
    assert "1 in all" in told[0]


# -- beginning and end ------------------------------------------------------------------------------------------------


def test_ports_that_are_not_named_are_free_ones(desk: Desk) -> None:
    ports = {desk.adapter.requests_port, desk.adapter.results_port, desk.adapter.control_port}
    assert len(ports) == 3
    other = Adapter()
    assert ports.isdisjoint({other.requests_port, other.results_port, other.control_port})
    other.close()


@pytest.mark.parametrize("which", ["requests_port", "results_port", "control_port"])
def test_a_port_that_is_in_use_is_an_adapter_error_and_leaves_nothing_open(desk: Desk, which: str) -> None:
    port = getattr(desk.adapter, which)
    desk.catch_up()
    before = open_descriptors()
    with pytest.raises(AdapterError, match=f"tcp://127.0.0.1:{port}: .*in use"):
        Adapter(**{which: port})
    assert open_descriptors() <= before
    desk.catch_up()


def test_ports_are_free_again_after_the_end() -> None:
    first = Adapter()
    ports = {name: getattr(first, name) for name in ("requests_port", "results_port", "control_port")}
    first.close()
    second = Adapter(**ports)
    assert {name: getattr(second, name) for name in ports} == ports
    second.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_of_this_host_is_an_adapter_error(host: str) -> None:
    with pytest.raises(AdapterError, match=f"can't bind to tcp://{host}:"):
        Adapter(host=host)


def test_pausing_stops_requests_and_nothing_else(desk: Desk) -> None:
    desk.request({"request_id": "taken"})
    sender = desk.sender()
    sender.send(b'{"request_id": "last"}')
    assert desk.call()[1] == "last"
    desk.adapter.pause()
    desk.catch_up()
    sender.send(b'{"request_id": "late"}')
    asker = desk.asker()
    asker.send(b"taken")
    desk.say("taken", Output("taken", 0, 0, "done"))
    assert heard(asker) == [("taken", 0, 0, "done")]
    # Each takes no other call than its own.
    desk.catch_up()
    desk.catch_up()
    desk.adapter.close()
    assert desk.calls.empty()


def test_closing_sends_what_is_left(desk: Desk) -> None:
    _, address = desk.request({"request_id": "r1"})
    asker = desk.asker()
    asker.send(b"r1")
    desk.say(address, Output("r1", 0, 0, "x", False))
    assert heard(asker) == [("r1", 0, 0, "x")]
    for step in range(1, 201):
        desk.say(address, Output("r1", 0, step, "y", step == 200))
    desk.adapter.close()
    assert [heard(asker)[0][2] for _ in range(200)] == list(range(1, 201))


@pytest.mark.parametrize("started", [False, True], ids=["not started", "started"])
def test_closing_leaves_nothing_open_and_may_be_repeated(started: bool) -> None:
    before = open_descriptors()
    adapter = Adapter()
    if started:
        adapter.start(lambda call, address: None)
    adapter.close()
    adapter.close()
    assert open_descriptors() <= before


def test_what_is_sent_after_the_end_is_settled_and_lost(desk: Desk) -> None:
    settled: list[bool] = []
    desk.adapter.close()
    desk.adapter.send("r1", Events([Output("r1", 0, 0, 1)]), lambda: settled.append(True))
    assert settled == [True]


# -- what would take the thread down ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame", [b'{"request_id": "a", "task": ' + b"[" * 100_000, b"\x91" * 100_000], ids=["json", "msgpack"]
)
def test_what_is_nested_too_deeply_is_counted_and_passed_over(desk: Desk, frame: bytes) -> None:
    sender = desk.sender()
    sender.send(frame)
    sender.send(b'{"request_id": "good"}')
    assert desk.call()[1] == "good"
    assert desk.adapter.errors == 1


@pytest.mark.parametrize("value", [2**70, {1, 2}.__iter__(), np.longdouble(1), np.array([object()])])
def test_a_result_without_a_plain_form_is_a_failure_and_the_others_come(desk: Desk, value: Any) -> None:
    _, address = desk.request({"request_id": "r1", "choices": 2}, "msgpack")
    asker = desk.asker()
    asker.send_multipart([b"", b"r1"])
    desk.say(address, Output("r1", 0, 0, value), Output("r1", 1, 0, "fine"))
    _, body = asker.recv_multipart()
    failed, fine = msgspec.msgpack.decode(body)
    assert (failed["choice"], failed["finished"], failed["failure"]["kind"]) == (0, True, "handler")
    assert (fine["choice"], fine["value"], fine["failure"]) == (1, "fine", None)


def test_a_call_that_can_t_be_handed_on_is_counted_and_passed_over() -> None:
    adapter = Adapter()
    calls: list[str] = []

    def submit(call: Call, address: str) -> None:
        if address == "bad":
            raise RuntimeError("not now")
        calls.append(address)

    adapter.start(submit)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(f"tcp://127.0.0.1:{adapter.requests_port}")
        sender.send(b'{"request_id": "bad"}')
        sender.send(b'{"request_id": "good"}')
        eventually(lambda: calls == ["good"], "the next call is handed on")
        adapter.close()
    assert adapter.errors == 1


@pytest.mark.parametrize("choices", [0, -1, 5000])
def test_a_request_for_an_impossible_number_of_choices_is_over_with_one_failure(desk: Desk, choices: int) -> None:
    _, address = desk.request({"request_id": "r1", "choices": choices})
    asker = desk.asker()
    asker.send_multipart([b"", b"r1"])
    desk.catch_up()
    desk.say(address, Output("r1", 0, 0, None, True, Failure("invalid", "not so many")))
    _, body = asker.recv_multipart()
    assert msgspec.json.decode(body)[0]["failure"]["kind"] == "invalid"
    eventually(lambda: not desk.adapter._asked, "the request is forgotten")
