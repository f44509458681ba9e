"""Deliberate faults of topics; see ``mutations``."""

from __future__ import annotations

import functools

from fmq.topic_protocol import PublisherProtocol, SubscriberProtocol
from shmq.topic import TopicReader, TopicWriter
from shmq.writer import RingWriter
from tests.simulation import topic_schedule
from tests.simulation.mutations import Mutation

_Topic = functools.partial(Mutation, run=topic_schedule.run)

TOPIC_MUTATIONS = (
    # -- taking, and taking back
    _Topic(
        "no fence after the claim",
        "a reader claims a message and looks at what was taken back without a fence between",
        ((TopicReader, "_claim", "fence.full()", "pass"),),
        focus="skips",
    ),
    _Topic(
        "no fence before the claim",
        "a reader claims a message without a fence after it has taken the one before",
        ((TopicReader, "_claim", "fence.publish()", "pass"),),
        weak=True,
        focus="skips",
    ),
    _Topic(
        "claim ignored",
        "the publisher takes back the message that a reader is just taking",
        ((TopicWriter, "_take_back", "+ POSITION_WORD] == claimed:", "+ POSITION_WORD] == -1:"),),
        focus="skips",
    ),
    _Topic(
        "no fence before the look at the claim",
        "the publisher says what it takes back and looks at the claim without a fence between",
        ((TopicWriter, "_take_back", "fence.full()", "pass"),),
        focus="skips",
    ),
    _Topic(
        "no fence after the look at the claim",
        "the publisher looks at the claim and then at the release bytes without a fence between",
        ((TopicWriter, "_take_back", "fence.observe()", "pass"),),
        weak=True,
        focus="skips",
    ),
    _Topic(
        "taken back from hands",
        "the publisher frees what a reader has taken, too",
        ((TopicWriter, "_take_back", "if memory[at] != OFFERED:", "if memory[at] not in (OFFERED, TAKEN):"),),
        focus="skips",
    ),
    _Topic(
        "taken back by both and freed by neither",
        "the publisher does not look again at what it left to a reader that had claimed it",
        ((TopicWriter, "_take_back", "self._left[slot] = offset, is_skip", "pass"),),
        focus="skips",
    ),
    _Topic(
        "claim kept",
        "a reader that sees its message taken back goes on claiming it",
        ((TopicReader, "_claim", "words[CLAIM + self._slot] = INVALID_POSITION", "pass"),),
        focus="skips",
    ),
    _Topic(
        "skipped as far as it looks",
        "a reader takes what was taken back, if the publisher has not freed it yet",
        ((TopicReader, "_claim", "skip_to & -ALIGN <= position and", ""),),
        focus="skips",
    ),
    # -- joining, and being dropped
    _Topic(
        "offers after head",
        "a message is announced before it says whom it is for",
        (
            (RingWriter, "_post_with", "    self._offer(start)\n", ""),
            (
                RingWriter,
                "_post_with",
                "self._announce(position + length, sequence + 1)\n",
                "self._announce(position + length, sequence + 1)\n    self._offer(start)\n",
            ),
        ),
    ),
    _Topic(
        "readers met late",
        "a message is offered only to those readers that the publisher has met for another reason",
        ((TopicWriter, "_post_with", "self._meet()", "pass"),),
        weak=False,
    ),
    _Topic(
        "slot as it was",
        "a reader does not free what the one before had taken",
        ((TopicReader, "_enter", "if record.state not in (FREE, OFFERED):", "if False:"),),
        focus="joins",
    ),
    _Topic(
        "joined before the slot is clean",
        "a reader joins, and then frees all that it finds",
        (
            (TopicReader, "_enter", "    self._join()\n", ""),
            (TopicReader, "_enter", "INVALID_POSITION\n", "INVALID_POSITION\n    self._join()\n"),
            (TopicReader, "_enter", "record.state not in (FREE, OFFERED)", "record.state != FREE"),
        ),
        focus="joins",
    ),
    _Topic(
        "old offers stay",
        "the publisher does not take back what was offered to the reader before",
        (
            (
                TopicWriter,
                "_meet",
                "self._take_back(slot)",
                "self._words[SKIP_TO + slot] = self._position | memoryview(joined).cast('Q')[slot] % _NUMBERS << 1",
            ),
        ),
        focus="joins",
    ),
    _Topic(
        "heir of messages",
        "a reader takes what was offered to the one before, as long as the publisher has not met it",
        ((TopicReader, "_claim", " and self._is_met(skip_to)", ""),),
        focus="joins",
    ),
    _Topic(
        "heir of a drop",
        "a reader is told that it was dropped when that was the one before",
        ((TopicReader, "_is_dropped", " and self._is_met(skip_to)", ""),),
        focus="drops",
    ),
    _Topic(
        "dropped for good",
        "a reader that was dropped does not join again",
        ((TopicReader, "take", "self._join()", "pass"),),
        focus="drops",
    ),
    _Topic(
        "dropped in silence",
        "a reader that was dropped is done with a ring without being told",
        ((TopicReader, "has_more", " or self._is_dropped()", ""),),
        focus="drops",
    ),
    # -- giving back, and using again
    _Topic(
        "one reader forgotten",
        "a message is free although one release byte says that it is not",
        ((TopicWriter, "_is_settled", "!= _ALL_FREE", ".count(FREE) < SLOTS - 1"),),
    ),
    _Topic(
        "free for the first reader",
        "a message is free when the first reader is through with it",
        ((TopicWriter, "_is_settled", "self._release(offset) != _ALL_FREE", "self._release(offset)[0] != FREE"),),
    ),
    _Topic(
        "living reader taken for dead",
        "the publisher frees a slot without having its lock",
        ((TopicWriter, "_free_slot", "if not self.segment.claim(slot):", "if False:"),),
    ),
    _Topic(
        "dead reader kept",
        "what a dead reader held is not freed",
        ((TopicWriter, "_free_slot", "self._memory[_RELEASE + offset + slot] = FREE", "pass"),),
        focus="joins",
    ),
    _Topic(
        "no room from the dead",
        "a publisher without room does not look for readers that are gone",
        ((TopicWriter, "_make_room", " or (self.free_dead() > 0 and super()._make_room(length, share))", ""),),
        focus="joins",
    ),
    # -- wake-ups
    _Topic(
        "no doorbell",
        "a sleeping reader is not rung",
        ((PublisherProtocol, "frames", "if asleep and asleep != rung", "if False and asleep != rung"),),
        focus="wakes",
    ),
    _Topic(
        "no fence before the Join",
        "a reader says that it has joined without a fence after it did",
        ((SubscriberProtocol, "_joins", "fence.full()", "pass"),),
    ),
    _Topic(
        "gone without a word",
        "a reader that leaves does not tell the publisher, which waits for what it had",
        ((SubscriberProtocol, "close", "return [", "return [][:0] and ["),),
    ),
)
