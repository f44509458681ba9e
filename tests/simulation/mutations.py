"""Deliberate faults: small changes of the real code, each of which the simulation has to notice.

A mutation replaces a piece of a function's source that has to occur there once, so that it can't silently miss its
target when the code changes.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fmq.consumer import ConsumerBase
from fmq.producer import Producer, ProducerBase
from fmq.protocol import ConsumerProtocol, ProducerProtocol
from shmq.reader import RingReader
from shmq.writer import RingWriter
from tests.simulation import schedule


@dataclass(frozen=True, slots=True)
class Mutation:
    """``changes``: (class, method, what is there, what comes instead). ``weak``: needs the weak memory model, or the
    other if False. ``focus``: see ``schedule.FOCUSES``. ``run``: what runs the schedule of a seed. ``rare``: it takes
    tens of thousands of schedules to notice, more than the tests have time for; see ``__main__``.
    """

    name: str
    what: str
    changes: tuple[tuple[type, str, str, str], ...]
    weak: bool | None = None
    focus: str = "all"
    rare: bool = False
    run: Callable[..., schedule.Outcome] = schedule.run

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the code be wrong for a while."""
        real = {(owner, name): vars(owner)[name] for owner, name, _, _ in self.changes}
        try:
            for owner, name in real:
                changes = [change[2:] for change in self.changes if change[:2] == (owner, name)]
                setattr(owner, name, _rewritten(owner, real[owner, name], changes))
            yield
        finally:
            for (owner, name), function in real.items():
                setattr(owner, name, function)

    def seeds(self) -> Iterator[int]:
        """All seeds, without end, of a memory model that can show the fault."""
        return (seed for seed in itertools.count() if self.weak in (None, schedule.is_weak(seed)))


def _rewritten(owner: type, function: Callable[..., Any], changes: list[tuple[str, str]]) -> Callable[..., Any]:
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if source.count(old) != 1:
            raise AssertionError(f"{function.__qualname__} has {source.count(old)} times {old!r}, and not once")
        source = source.replace(old, new)
    # Within another function, which knows the class that ``super()`` asks for.
    source = f"def make(__class__):\n{textwrap.indent(source, '    ')}\n    return {function.__name__}"
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"<mutated {function.__qualname__}>", "exec", flags, dont_inherit=True)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    mutated: Callable[..., Any] = namespace["make"](owner)
    return mutated


MUTATIONS = (
    # -- wake-ups
    Mutation(
        "no fence before sleep",
        "the consumer raises asleep and looks for messages without a fence between",
        ((ConsumerProtocol, "fall_asleep", "fence.full()", "pass"),),
        focus="wakes",
        weak=False,
    ),
    Mutation(
        "no fence after post",
        "a put looks at asleep without a fence since it stored head",
        ((Producer, "put", "if not LOCK_IS_FENCE:", "if False:"),),
        weak=True,
        focus="small",
    ),
    Mutation(
        "no fence after a large post",
        "a put with arrays looks at asleep without a fence since it stored head",
        ((ProducerBase, "_send_frames", "if not LOCK_IS_FENCE:", "if False:"),),
        weak=True,
        focus="wakes",
    ),
    Mutation(
        "no fence after release",
        "the consumer gives back and looks at wanted without a fence between",
        ((ConsumerProtocol, "spaces", "fence.full()", "pass"),),
        weak=True,
        focus="wakes",
    ),
    Mutation(
        "no fence after the wish",
        "the producer raises wanted and tries again without a fence between",
        ((RingWriter, "want_space", "fence.full()", "pass"),),
        focus="wakes",
    ),
    Mutation(
        "no look before sleep",
        "the consumer sleeps without having looked again after it raised asleep",
        ((ConsumerProtocol, "fall_asleep", "return not self.has_more()", "return True"),),
        focus="wakes",
    ),
    Mutation(
        "no try after the wish",
        "the producer tries for room before it raises wanted, and not after",
        (
            (
                ProducerBase,
                "_until",
                "self._protocol.want_space()\n                result = attempt()",
                "result = attempt()\n                self._protocol.want_space()",
            ),
        ),
        focus="wakes",
    ),
    Mutation(
        "one number for all sleeps",
        "a second sleep has the number of the first, and looks answered",
        ((ConsumerProtocol, "fall_asleep", "self._sleeps += 1", "pass"),),
    ),
    Mutation(
        "one number for all wishes",
        "a second wish for space has the number of the first, and looks answered",
        ((ProducerProtocol, "want_space", "self._wish += 1", "self._wish = 1"),),
    ),
    Mutation(
        "one frame at a time",
        "the consumer takes one frame from its socket, whose descriptor then stays silent about the others",
        (
            (
                ConsumerBase,
                "_hear",
                "while self._bell.readable() and (received := self._bell.receive_from()) is not None:",
                "if self._bell.readable() and (received := self._bell.receive_from()) is not None:",
            ),
        ),
    ),
    Mutation(
        "edge used up by sending",
        "the producer does not look at its socket again after it has sent something, and waits for its descriptor",
        ((ProducerBase, "_pump", "if not self._send_frames():", "if not self._send_frames() or True:"),),
        focus="wakes",
    ),
    Mutation(
        "space without a release",
        "a wish for space is answered although nothing was given back, so that two idle sides wake each other",
        ((RingReader, "wanted", "self._has_freed and ", ""),),
    ),
    # -- publishing
    Mutation(
        "no publish fence",
        "head is stored without a fence after the record",
        ((RingWriter, "post", "fence.publish()", "pass"),),
        weak=True,
        focus="small",
    ),
    Mutation(
        "no publish fence after payloads",
        "head is stored without a fence after a record with payloads, or after a payload",
        ((RingWriter, "_announce", "fence.publish()", "pass"),),
        weak=True,
        focus="folds",
    ),
    Mutation(
        "no observe fence",
        "a record is read without a fence after head was",
        ((RingReader, "_look", "fence.observe()", "pass"),),
        weak=True,
    ),
    Mutation(
        "head before the record",
        "head is stored before the record it announces",
        (
            (
                RingWriter,
                "post",
                "        NEW_RECORD.pack_into(",
                "        self._words[HEAD] = position + length\n        NEW_RECORD.pack_into(",
            ),
        ),
    ),
    Mutation(
        "payload settled after head",
        "a payload becomes COMMITTED after the message that refers to it was announced",
        (
            (RingWriter, "_post_with", "        self._settle(payload, COMMITTED)\n", ""),
            (
                RingWriter,
                "_post_with",
                "self._announce(position + length, sequence + 1)\n",
                "self._announce(position + length, sequence + 1)\n"
                "    for payload in payloads:\n        self._settle(payload, COMMITTED)\n",
            ),
        ),
    ),
    Mutation(
        "jump target after its descriptor",
        "a fold changes the descriptor first and stores the target then",
        (
            (RingWriter, "_fold", "            words[word + JUMP_TARGET_WORD[kind]] = target\n", ""),
            (
                RingWriter,
                "_fold",
                "words[word + DESCRIPTOR_WORD] = descriptor(kind, COMMITTED, span)\n",
                "words[word + DESCRIPTOR_WORD] = descriptor(kind, COMMITTED, span)\n"
                "            words[word + JUMP_TARGET_WORD[kind]] = target\n",
            ),
        ),
        focus="folds",
    ),
    Mutation(
        "no fence before a jump's descriptor",
        "a fold stores the target and the descriptor of a jump without a fence between",
        ((RingWriter, "_fold", "= target\n            fence.publish()", "= target"),),
        weak=True,
        focus="folds",
    ),
    Mutation(
        "reader slot forgotten",
        "a new record keeps the release byte of what was there before",
        (
            (
                RingWriter,
                "post",
                "expires, encoding, 0, 0\n",
                "expires, encoding, 0, self._words[(start + RELEASE_BYTE) // 8]\n",
            ),
        ),
    ),
    # -- giving back, and using again
    Mutation(
        "free before the last read",
        "a message is free as soon as it is taken, before its body was copied out",
        ((RingReader, "take", "memory[self._mark + offset] = TAKEN", "memory[self._mark + offset] = FREE"),),
    ),
    Mutation(
        "freed under a view",
        "a message that was released is free although arrays of it are alive",
        ((RingReader, "_settle", "] = DONE", "] = FREE"),),
    ),
    Mutation(
        "reclaimed under a view",
        "the writer takes back what is done, and does not wait until it is free",
        ((RingWriter, "reclaim", "!= FREE", "< DONE"),),
        focus="folds",
    ),
    Mutation(
        "reclaimed unseen",
        "the writer takes back messages without a look at their release bytes",
        (
            (
                RingWriter,
                "reclaim",
                "elif target < 0 and memory[mark + offset] != FREE:",
                "elif False:",
            ),
        ),
    ),
    Mutation(
        "payload reclaimed under its message",
        "the writer takes back a payload although messages that refer to it are not free",
        ((RingWriter, "_payload_is_free", "return not payload.held and all(", "return not payload.held or all("),),
    ),
    Mutation(
        "loan used again",
        "the writer takes back a loan that was sent and whose array is still in use",
        ((RingWriter, "_payload_is_free", "not payload.held and", "(payload.messages or not payload.held) and"),),
    ),
    Mutation(
        "position not checked",
        "the reader believes a header without a second look at its position",
        ((RingReader, "take", "if words[at >> 3] != position:", "if False:"),),
        focus="lag",
    ),
    Mutation(
        "no observe fence before the position",
        "the reader looks at the position again without a fence after it read the header",
        ((RingReader, "take", "fence.observe()", "pass"),),
        weak=True,
        focus="lag",
    ),
    Mutation(
        "space used again as it is",
        "the writer writes over records whose positions it has not made invalid",
        ((RingWriter, "_invalidate", "= INVALID_POSITION", "= words[(HEADER_BYTES + entry[0]) // 8]"),),
        focus="lag",
    ),
    Mutation(
        "no fence before invalidating",
        "the writer makes positions invalid without a fence after it moved the tail or counted the fold",
        ((RingWriter, "_invalidate", "why.\n    fence.publish()", "why."),),
        weak=True,
        focus="lag",
        rare=True,
    ),
    Mutation(
        "tail moved late",
        "the tail is moved one reclaim late, when the space before it may be used again",
        (
            (
                RingWriter,
                "reclaim",
                "words[TAIL] = pack_tail(",
                "words[TAIL], self._later = self.__dict__.get('_later', 0), pack_tail(",
            ),
        ),
    ),
    # -- deaths
    Mutation(
        "taken is forgotten",
        "what a consumer was handed that died is not delivered again",
        ((RingReader, "_admit", "if DONE <= state <= SET_ASIDE:", "if state:"),),
    ),
    Mutation(
        "redelivered is not said",
        "what comes again does not say so",
        (
            (
                RingReader,
                "_count_delivery",
                "deliveries = deliveries + (1 if state == RETURNED else DEATH + 1) & _WORD",
                "pass",
            ),
        ),
    ),
    Mutation(
        "done comes again",
        "what was acknowledged while its arrays were alive is delivered to the next consumer",
        ((RingReader, "_admit", "if DONE <= state <= SET_ASIDE:", "if DONE < state <= SET_ASIDE:"),),
    ),
    Mutation(
        "starts at head",
        "a new consumer reads only what is put after it came",
        (
            (
                RingReader,
                "__init__",
                "self._head = self._position\n",
                "self._head = self._position\n"
                "    for record in self.records():\n"
                "        self._position, self._offset = record.position, record.offset\n",
            ),
        ),
    ),
    Mutation(
        "orphan removed too early",
        "the ring of a dead producer is removed although messages of it are not done",
        ((ConsumerProtocol, "_remove_if_drained", "if source.reader.pending():", "if False:"),),
    ),
    Mutation(
        "ttl ignored",
        "a message is delivered after its time",
        ((RingReader, "_expire", "if not expires or expires > time.monotonic_ns():", "if True:"),),
    ),
)


def catch(mutation: Mutation, schedules: int) -> tuple[schedule.Failure | None, int]:
    """Run schedules of the mutated code until one fails; (the failure, after how many). The patches are in force."""
    with mutation.applied():
        for count, seed in enumerate(mutation.seeds(), 1):
            try:
                mutation.run(seed, focus=mutation.focus)
            except schedule.Failure as failure:
                return failure.with_traceback(None), count
            if count == schedules:
                break
    return None, schedules
