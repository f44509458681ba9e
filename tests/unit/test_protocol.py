"""The protocol of producer and consumer, without sockets and clocks, over real rings that only the test can see."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fmq import CorruptRecordError, DecodeError, Message, ProtocolError, wire
from fmq.encoding import BLOB_LAST, MSGPACK, PICKLE, RAW
from fmq.encoding import decode as decode_payload
from fmq.protocol import ConsumerProtocol, ProducerProtocol
from shmq import Record, RingReader, RingWriter, Segment, SegmentMissingError
from shmq.errors import ForeignSegmentError
from shmq.layout import DESCRIPTOR_WORD, HEADER_BYTES
from shmq.segment import unlink


class World:
    """A directory of rings, some of which can't be read, and a consumer that reports into lists."""

    def __init__(self, make_name: Callable[[], str]) -> None:
        self._make_name = make_name
        self.writers: dict[str, RingWriter] = {}
        self.foreign: set[str] = set()
        self.removed: list[str] = []
        self.reports: list[str] = []
        self.aside: list[tuple[str, Record]] = []
        self.released = 0
        self._epoch = 0
        self.consumers: list[ConsumerProtocol] = []

    def producer(self) -> ProducerProtocol:
        segment = Segment.create(self._make_name(), 64 * 1024, ring_id=b"")
        self.writers[segment.name] = writer = RingWriter(segment, spill_limit=1 << 20)
        return ProducerProtocol(writer)

    def consumer(self) -> ConsumerProtocol:
        self._epoch += 1
        consumer = ConsumerProtocol(
            self,
            self._epoch,
            self.decode,
            self._count,
            lambda error: self.reports.append(str(error)),
            lambda source, record: self.aside.append((source.producer, record)),
            lambda: 64,
        )
        self.consumers.append(consumer)
        return consumer

    def _count(self) -> None:
        self.released += 1

    @staticmethod
    def decode(encoding: int, blob: bytes, views: list[Any]) -> Any:
        if blob == b"bad":
            raise DecodeError("bad")
        return decode_payload(encoding, blob, views, lambda blob, views: (blob, views))

    # What the protocol asks of a directory of rings.

    def names(self) -> list[str]:
        return sorted([*self.writers, *self.foreign])

    def attach(self, name: str, epoch: int) -> RingReader:
        if name in self.foreign:
            raise ForeignSegmentError(f"{name} is no ring")
        return RingReader(Segment.attach(name), epoch=epoch)

    def remove(self, name: str) -> None:
        self.removed.append(name)
        unlink(name)
        self.writers.pop(name, None)

    def close(self) -> None:
        for consumer in self.consumers:
            for source in list(consumer._order):
                source.reader.retire()
        for writer in self.writers.values():
            writer.close(remove=True)


@pytest.fixture
def world(make_name: Callable[[], str]) -> Iterator[World]:
    world = World(make_name)
    yield world
    world.close()


def ring_of(producer: ProducerProtocol) -> str:
    return producer.writer.segment.name


def post(producer: ProducerProtocol, blob: bytes = b"x") -> int:
    sequence = producer.writer.post(blob, RAW, 0)
    assert sequence is not None
    return sequence


def post_array(producer: ProducerProtocol, nbytes: int = 100) -> int:
    def fill(index: int, target: np.ndarray[Any, Any]) -> None:
        target[:] = 7

    sequence = producer.writer.post_with(b"blob", MSGPACK, 0, 0, [nbytes], fill)
    assert sequence is not None
    return sequence


def take(consumer: ConsumerProtocol) -> Message:
    message = consumer.take()
    assert message is not None
    return message


def decoded(frames: list[bytes]) -> list[wire.Frame]:
    return [wire.decode(frame) for frame in frames]


def damage(producer: ProducerProtocol, offset: int = 0) -> None:
    producer.writer.segment.words[(HEADER_BYTES + offset) // 8 + DESCRIPTOR_WORD] |= 0xFF << 20


# -- hello ------------------------------------------------------------------------------------------------------------


def test_a_hello_attaches_the_ring_and_is_answered_with_a_welcome(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    post(producer)
    assert consumer.take() is None
    answers = consumer.receive(b"address", producer.hello())
    assert [(to, wire.decode(frame)) for to, frame in answers] == [(b"address", wire.Welcome(wire.VERSION, ""))]
    producer.receive(answers[0][1])
    assert producer.problem == ""
    assert take(consumer).payload == b"x"


def test_a_hello_from_a_ring_that_is_not_there_is_told_so(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    name = ring_of(producer)
    hello = producer.hello()
    writer = world.writers.pop(name)
    ((_, answer),) = consumer.receive(b"a", hello)
    producer.receive(answer)
    assert producer.problem == "it is not there"
    writer.close(remove=True)


def test_a_hello_from_a_ring_that_cannot_be_read_is_told_why(world: World) -> None:
    consumer = world.consumer()
    world.foreign.add("foreign")
    ((_, answer),) = consumer.receive(b"a", wire.encode(wire.Hello(wire.VERSION, "foreign")))
    assert wire.decode(answer) == wire.Welcome(wire.VERSION, "foreign is no ring")
    assert world.reports == ["foreign is no ring"]


def test_a_ring_that_cannot_be_read_is_reported_once_and_does_not_hide_the_others(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    world.foreign |= {"aaa", "zzz"}
    for _ in range(3):
        consumer.discover()
    assert sorted(world.reports) == ["aaa is no ring", "zzz is no ring"]
    post(producer)
    assert take(consumer).payload == b"x"


def test_a_ring_that_goes_while_it_is_attached_is_no_matter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = world.producer(), world.consumer()

    def gone(name: str, epoch: int) -> RingReader:
        raise SegmentMissingError(name)

    with monkeypatch.context() as patch:
        patch.setattr(world, "attach", gone)
        consumer.discover()
    assert world.reports == []
    post(producer)
    consumer.discover()
    assert take(consumer).payload == b"x"


def test_messages_are_found_though_every_frame_was_lost(world: World) -> None:
    producers = [world.producer() for _ in range(3)]
    for producer in producers:
        post(producer)
    consumer = world.consumer()
    consumer.discover()
    assert {take(consumer).producer for _ in producers} == {ring_of(p).rpartition(":")[2] for p in producers}
    assert consumer.take() is None


def test_a_producer_says_hello_again_to_a_consumer_that_is_new(world: World) -> None:
    producer = world.producer()
    for _ in range(3):
        consumer = world.consumer()
        consumer.discover()
        assert decoded(producer.frames()) == [wire.Hello(wire.VERSION, ring_of(producer))]
        assert producer.frames() == []
        consumer.close(hand_back=False)


# -- frames that nobody should send -----------------------------------------------------------------------------------


def test_frames_of_the_wrong_side_are_protocol_errors_that_name_the_kind(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    for frame in (wire.Welcome(1, ""), wire.Space(1)):
        with pytest.raises(ProtocolError, match=type(frame).__name__):
            consumer.receive(b"a", wire.encode(frame))
    for frame in (wire.Hello(1, "r"), wire.Doorbell("r", 0, 0), wire.Goodbye("r")):
        with pytest.raises(ProtocolError, match=type(frame).__name__):
            producer.receive(wire.encode(frame))
    for machine in (producer.receive, lambda data: consumer.receive(b"a", data)):
        with pytest.raises(ProtocolError, match="none of fmq's"):
            machine(b"garbage")


def test_a_consumer_of_another_version_is_a_protocol_error_with_both_numbers(world: World) -> None:
    with pytest.raises(ProtocolError, match=r"version 99 .* this process 1; run the same version"):
        world.producer().receive(wire.encode(wire.Welcome(99, "")))


def test_doorbells_and_goodbyes_for_rings_that_are_not_there_are_passed_over(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    for frame in (wire.Doorbell("nowhere", 2**64 - 1, 0), wire.Goodbye("nowhere"), wire.Doorbell("../../etc", 0, 0)):
        assert consumer.receive(b"a", wire.encode(frame)) == []
    post(producer)
    consumer.discover()
    assert take(consumer).payload == b"x"


@pytest.mark.parametrize("seed", range(5))
def test_frames_lost_doubled_and_late_change_nothing_about_the_messages(world: World, seed: int) -> None:
    chance = random.Random(seed)
    producers = {b"%d" % index: world.producer() for index in range(3)}
    consumer = world.consumer()
    sent: dict[bytes, list[bytes]] = {address: [] for address in producers}
    got: dict[str, list[bytes]] = {ring_of(p): [] for p in producers.values()}
    mail: list[tuple[bytes, bytes]] = [(address, p.hello()) for address, p in producers.items()]
    for step in range(600):
        address = chance.choice(list(producers))
        producer = producers[address]
        match chance.randrange(5):
            case 0:
                blob = b"%s %d" % (address, step)
                if producer.writer.post(blob, RAW, 0) is not None:
                    sent[address].append(blob)
            case 1:
                mail += [(address, frame) for frame in producer.frames()]
            case 2 if mail:
                at = chance.randrange(len(mail))
                address, frame = mail[at]
                if chance.random() < 0.7:
                    del mail[at]
                if chance.random() < 0.7:
                    for to, answer in consumer.receive(address, frame):
                        producers[to].receive(answer)
            case 3:
                consumer.fall_asleep()
            case 4:
                consumer.wake_up()
                while (message := consumer.take()) is not None:
                    got[f"{message._source.reader.name}"].append(message.payload)
                    message.release()
    consumer.discover()
    while (message := consumer.take()) is not None:
        got[message._source.reader.name].append(message.payload)
        message.release()
    assert got == {ring_of(producers[address]): blobs for address, blobs in sent.items()}


# -- doorbells --------------------------------------------------------------------------------------------------------


def test_a_consumer_that_is_awake_hears_no_doorbell(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"a", producer.hello())
    producer.frames()
    for _ in range(10):
        post(producer)
        assert producer.frames() == []


def test_each_sleep_is_ended_by_one_doorbell_for_many_messages(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"a", producer.hello())
    producer.frames()
    for night in range(1, 4):
        assert consumer.fall_asleep()
        rung: list[wire.Frame] = []
        for _ in range(5):
            post(producer)
            rung += decoded(producer.frames())
        assert rung == [wire.Doorbell(ring_of(producer), producer.writer.position - 4 * 192, 5 * night - 4)]
        consumer.wake_up()
        while (message := consumer.take()) is not None:
            message.release()
    assert producer.frames() == []


def test_a_consumer_does_not_sleep_while_there_is_something_to_take(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    assert consumer.fall_asleep()
    post(producer)
    assert not consumer.fall_asleep()
    take(consumer).release()
    assert consumer.fall_asleep()


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("pppccc"))), ids="".join)
def test_in_every_order_of_a_post_and_a_falling_asleep_the_message_is_noticed(world: World, order: str) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    producer.frames()
    rung: list[bytes] = []
    sleeping: list[bool] = []

    def produce() -> Iterator[None]:
        post(producer)
        yield
        rung.extend(producer.frames())
        yield

    def consume() -> Iterator[None]:
        if consumer.take() is not None:
            sleeping.append(False)
            yield
            return
        yield
        sleeping.append(consumer.fall_asleep())
        yield

    sides = {"p": produce(), "c": consume()}
    for side in order:
        next(sides[side], None)
    assert rung or sleeping == [False]


# -- space ------------------------------------------------------------------------------------------------------------


def fill(producer: ProducerProtocol) -> int:
    count = 0
    while producer.writer.post(bytes(8000), RAW, 0) is not None:
        count += 1
    return count


def test_a_producer_that_waits_is_told_of_space_once_for_each_wish(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"address", producer.hello())
    assert consumer.spaces() == []
    assert fill(producer) > 2
    producer.begin_wait()
    for wish in (1, 2, 3):
        producer.want_space()
        take(consumer).release()
        assert [(to, wire.decode(frame)) for to, frame in consumer.spaces()] == [(b"address", wire.Space(wish))]
        assert consumer.spaces() == []
    assert world.released == 3
    producer.end_wait()
    take(consumer).release()
    assert consumer.spaces() == []


def test_a_wish_stands_until_the_last_waiter_has_gone(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"address", producer.hello())
    fill(producer)
    producer.begin_wait()
    producer.begin_wait()
    producer.want_space()
    producer.end_wait()
    take(consumer).release()
    assert len(consumer.spaces()) == 1
    producer.want_space()
    producer.end_wait()
    take(consumer).release()
    assert consumer.spaces() == []


def test_nobody_is_told_of_space_where_nothing_was_given_back(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"address", producer.hello())
    fill(producer)
    held = [take(consumer), take(consumer)]
    producer.begin_wait()
    for _ in range(5):
        producer.want_space()
        assert consumer.spaces() == []
    held.pop().release()
    assert len(consumer.spaces()) == 1
    producer.want_space()
    assert consumer.spaces() == []


def test_what_was_given_back_before_anybody_asked_is_told_to_the_first_who_asks(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"address", producer.hello())
    post(producer)
    take(consumer).release()
    assert consumer.spaces() == []
    producer.begin_wait()
    producer.want_space()
    assert len(consumer.spaces()) == 1


@pytest.mark.parametrize("drop", ["release", "del", "view"])
def test_every_way_of_giving_back_is_told_of(world: World, drop: str) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"address", producer.hello())
    post_array(producer)
    message = take(consumer)
    view = message.payload[1][0]
    producer.begin_wait()
    producer.want_space()
    if drop == "release":
        view = None
    if drop == "del":
        del message, view
    else:
        message.release()
        view = None
    consumer.reap()
    assert len(consumer.spaces()) == 1


def test_space_goes_to_the_address_that_the_ring_used_last(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"old", producer.hello())
    consumer.receive(b"new", wire.encode(wire.Doorbell(ring_of(producer), 0, 0)))
    post(producer)
    producer.begin_wait()
    producer.want_space()
    take(consumer).release()
    assert [to for to, _ in consumer.spaces()] == [b"new"]


def test_a_wish_is_kept_until_the_producer_has_an_address(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    post(producer)
    producer.begin_wait()
    producer.want_space()
    take(consumer).release()
    assert consumer.spaces() == []
    consumer.receive(b"late", producer.hello())
    assert [to for to, _ in consumer.spaces()] == [b"late"]


# -- messages ---------------------------------------------------------------------------------------------------------


def test_rings_take_turns_of_sixty_four_messages(world: World) -> None:
    producers = [world.producer() for _ in range(3)]
    for producer in producers:
        for _ in range(100):
            post(producer)
    consumer = world.consumer()
    consumer.discover()
    order = [message.producer for message in iter(consumer.take, None)]
    runs = [len(list(run)) for _, run in itertools.groupby(order)]
    assert len(order) == 300
    assert max(runs) <= 65
    assert len(set(order[: 3 * 65])) == 3


def test_messages_of_one_ring_come_in_the_order_of_their_sequences(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    sent = [post(producer) if index % 3 else post_array(producer) for index in range(50)]
    assert [message.sequence for message in iter(consumer.take, None)] == sent == list(range(50))


def test_a_damaged_ring_is_an_error_once_and_the_others_go_on(world: World) -> None:
    bad, good = world.producer(), world.producer()
    post(bad, b"bad ring")
    post(good)
    damage(bad)
    consumer = world.consumer()
    consumer.discover()
    taken, errors = [], []
    for _ in range(4):
        try:
            if (message := consumer.take()) is not None:
                taken.append(message.payload)
        except CorruptRecordError as error:
            errors.append(error)
    assert taken == [b"x"]
    (error,) = errors
    assert (error.ring, error.position) == (ring_of(bad), 0)
    ((_, answer),) = consumer.receive(b"a", bad.hello())
    bad.receive(answer)
    assert "is damaged" in bad.problem
    consumer.discover()
    assert consumer.take() is None


def test_a_message_that_cannot_be_decoded_is_done_and_the_next_one_comes(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    producer.writer.post(b"bad", MSGPACK, 0)
    post(producer)
    with pytest.raises(DecodeError):
        consumer.take()
    take(consumer).release()
    assert producer.writer.unfinished() == 0


@pytest.mark.parametrize("encoding", [PICKLE, PICKLE + 1, 0x7F, RAW | BLOB_LAST, 0xFF])
def test_an_encoding_that_is_not_known_or_wanted_is_a_decode_error_and_the_message_is_done(
    world: World, encoding: int
) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    producer.writer.post(b"x", encoding, 0)
    with pytest.raises(DecodeError, match=r"encod|buffer"):
        consumer.take()
    assert consumer.take() is None
    assert producer.writer.unfinished() == 0


def test_an_undecodable_message_with_arrays_gives_its_space_back(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    producer.writer.post_with(b"bad", MSGPACK, 0, 0, [100], lambda index, target: None)
    with pytest.raises(DecodeError):
        consumer.take()
    consumer.reap()
    assert consumer._order[0].reader.pending() == 0


def test_a_reference_that_cannot_be_true_is_one_error_and_the_ring_goes_on(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    post_array(producer)
    post(producer)
    memory = producer.writer.segment.memory
    memory[HEADER_BYTES + 128 + 8 : HEADER_BYTES + 128 + 16] = b"\xff" * 8
    with pytest.raises(CorruptRecordError):
        consumer.take()
    assert take(consumer).payload == b"x"


# -- orphans and the end ----------------------------------------------------------------------------------------------


def test_the_ring_of_a_dead_producer_is_removed_when_it_is_drained_and_not_before(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    post(producer)
    post_array(producer)
    name = ring_of(producer)
    consumer.tidy()
    assert world.removed == []
    producer.writer.close(remove=False)
    consumer.tidy()
    assert world.removed == []
    take(consumer).release()
    message = take(consumer)
    view = message.payload[1][0]
    message.release()
    del message
    consumer.tidy()
    assert world.removed == []
    assert (view == 7).all()
    del view
    consumer.tidy()
    assert world.removed == [name]
    assert consumer.take() is None
    consumer.tidy()


def test_a_goodbye_forgets_the_ring_of_a_producer_that_closed(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.receive(b"a", producer.hello())
    goodbye = producer.goodbye()
    world.writers.pop(ring_of(producer)).close(remove=True)
    assert consumer.receive(b"a", goodbye) == []
    assert consumer.take() is None
    assert not consumer._sources


def test_what_was_taken_and_not_released_comes_again_to_the_next_consumer(world: World) -> None:
    producer, first = world.producer(), world.consumer()
    first.discover()
    sent = [post(producer, b"%d" % index) for index in range(5)]
    kept = [take(first) for _ in range(4)]
    kept[1].release()
    first.close(hand_back=False)
    second = world.consumer()
    second.discover()
    again = [take(second) for _ in range(4)]
    assert [message.sequence for message in again] == [sent[0], *sent[2:]]
    assert [message.deliveries for message in again] == [1, 1, 1, 0]
    assert [message.redelivered for message in again] == [True, True, True, False]
    assert second.take() is None


def test_each_delivery_in_vain_is_counted(world: World) -> None:
    producer = world.producer()
    post(producer)
    for life in range(4):
        consumer = world.consumer()
        consumer.discover()
        message = take(consumer)
        assert message.deliveries == life
        consumer.close(hand_back=False)


def test_the_rings_of_views_that_are_alive_are_named(world: World) -> None:
    producer, consumer = world.producer(), world.consumer()
    consumer.discover()
    assert consumer.held() == []
    for _ in range(2):
        post_array(producer)
    messages = [take(consumer), take(consumer)]
    (line,) = consumer.held()
    assert line == f"2 messages of producer {messages[0].producer}"
    del messages
    assert consumer.held() == []
