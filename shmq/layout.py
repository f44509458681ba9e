"""Where each byte of a segment lies. Nothing else here, and no byte offset anywhere else.

All words are 64-bit, aligned, in the host's byte order: a segment never leaves its host.

A ring segment::

    byte     0                 8                16                24                32
             +-----------------+----------------+-----------------+-----------------+
         0   | magic           | layout version | header size     | ring size       |   identity
        32   | ring id (16 bytes)               | owner pid       | created (ns)    |
        64   | name, UTF-8, zero-padded (256 bytes)                                  |
             +-----------------+----------------+-----------------+-----------------+
       512   | head            | next sequence  | tail            | wanted          |   written by the producer
             +-----------------+----------------+-----------------+-----------------+
       768   | epoch           | pid            | asleep          |                 |   written by the consumer
             +-----------------+----------------+-----------------+-----------------+
      1024   | spills          | spilled bytes  | stalls          | high water      |   counters of the producer
      1056   | turns           | folds          | doorbells       | skipped         |
             +-----------------+----------------+-----------------+-----------------+
      1280   | redelivered     | expired        | set aside       |                 |   counters of the consumer
             +-----------------+----------------+-----------------+-----------------+
      1536   | joined, asleep, skip to, claim, pid: 64 words of each, one a slot     |   reader slots of a topic
             +-----------------+----------------+-----------------+-----------------+
      4096   | records, each aligned to 64 bytes, up to 4096 + ring size             |
             +-----------------------------------------------------------------------+

``position`` is the monotonic count of bytes ever written to the ring; ``offset`` is where in the ring a record lies,
counted from byte 4096. A record follows the one before it, save after a JUMP, which says where the chain goes on.
``head`` is the position of the next record. ``tail`` tells the oldest record that is still in use, as its offset and
the low bits of its position in one word, so that no reader ever sees half a move::

    tail = (position / 64 mod 2^34) << 30 | offset / 64          rings up to 64 GiB

A record::

    byte     0                 8                16                24                32
             +-----------------+----------------+-----------------+-----------------+
         0   | position        | descriptor     | sequence        | body length     |
        32   | timestamp (ns)  | expires (ns)   | extra           | deliveries      |
             +-----------------+----------------+-----------------+-----------------+
        64   | release byte of reader 0 | of reader 1 | ...                   of 63  |
             +-----------------------------------------------------------------------+
       128   | body, zero or more bytes, then unused ones up to a multiple of 64      |
             +-----------------------------------------------------------------------+

    descriptor = length << 10 | state << 8 | kind           one word, so that kind and length change together; length
                                                            is a multiple of 64, so it begins at bit 16
    extra      = JUMP: the offset at which the chain goes on (JUMP_OTHER: the body length holds it, see below)
                 MESSAGE: number of references << 8 | encoding
    deliveries = how often a consumer died with the message << 32 | how often one was handed it and is gone;
                 written by the next consumer

What a reader does with a message stands in its release byte::

    PENDING --> TAKEN --> DONE --> FREE         handed out; acknowledged; and no view of it is left
                TAKEN --> RETURNED --> TAKEN    handed back by a consumer that closed in order, or not begun by it
                TAKEN --> SET_ASIDE --> FREE    too many consumers died with it: kept for inspection

A *topic* is a ring (of another magic) with many readers. Each has a reader slot and the release byte of that number;
the bytes of slots that nobody has are FREE from the start, and those of readers begin with OFFERED::

    OFFERED --> TAKEN --> DONE --> FREE         as above
                TAKEN --> RETURNED --> TAKEN    put back by the reader itself
    OFFERED --> FREE                            taken back by the publisher: the reader was too slow, or is gone

When all 64 are FREE the publisher notes it in the first byte of the word that counts deliveries in a queue's ring. What
becomes of slots is written down in ``shmq.topic``.

``length`` is what the record takes of the position count: header, body and unused bytes; for a JUMP all that it stands
for. The body of a MESSAGE is its blob, then (aligned to 8) one reference of four words for each buffer, then (aligned
to 64) the buffers that are kept in the record itself::

    reference = where << 56 | offset of the record          IN_RECORD: offset counts from the start of this record
                position of the record                      IN_SPILL: spill number << 32 | generation
                offset of the first byte within its body
                length in bytes

A spill segment has the same identity (another magic, the generation where ``head`` is) and holds one payload at 4096.
A *board* has the same identity (a third magic), and words from 4096 on that its owner stores.
"""

from __future__ import annotations

import struct

ALIGN = 64
PAGE = 4096

RING_MAGIC = int.from_bytes(b"SHMQRING", "little")
SPILL_MAGIC = int.from_bytes(b"SHMQSPIL", "little")
TOPIC_MAGIC = int.from_bytes(b"SHMQTOPI", "little")
BOARD_MAGIC = int.from_bytes(b"SHMQBOAR", "little")
VERSION = 1

HEADER_BYTES = PAGE
"""Bytes of a segment before its ring (or its payload, in a spill)."""

# Words of the segment header, as indices into a memoryview of 64-bit words.
MAGIC = 0
LAYOUT_VERSION = 1
HEADER_SIZE = 2
RING_SIZE = 3
RING_ID_BYTE = 32
OWNER_PID = 6
CREATED = 7
NAME_BYTE = 64
NAME_BYTES = 256

HEAD = 512 // 8
NEXT_SEQUENCE = HEAD + 1
TAIL = HEAD + 2
WANTED = HEAD + 3
GENERATION = HEAD

EPOCH = 768 // 8
CONSUMER_PID = EPOCH + 1
ASLEEP = EPOCH + 2

SPILLS = 1024 // 8
SPILLED_BYTES = SPILLS + 1
STALLS = SPILLS + 2
HIGH_WATER = SPILLS + 3
TURNS = SPILLS + 4
FOLDS = SPILLS + 5
DOORBELLS = SPILLS + 6
SKIPPED_COUNT = SPILLS + 7

REDELIVERED_COUNT = 1280 // 8
EXPIRED_COUNT = REDELIVERED_COUNT + 1
SET_ASIDE_COUNT = REDELIVERED_COUNT + 2

SLOTS = 64
"""How many readers a topic can have at a time."""

# Words of the reader slots; that of slot k lies k words further.
JOINED = 1536 // 8
SLOT_ASLEEP = JOINED + SLOTS
SKIP_TO = SLOT_ASLEEP + SLOTS
CLAIM = SKIP_TO + SLOTS
SLOT_PID = CLAIM + SLOTS

# A record.
RECORD_BYTES = 128
RELEASE_BYTE = 64
POSITION_WORD = 0
DESCRIPTOR_WORD = 1
SEQUENCE_WORD = 2
BODY_WORD = 3
EXTRA_WORD = 6
DELIVERIES_WORD = 7
SETTLED_BYTE = 8 * DELIVERIES_WORD
"""In a topic's ring: FREE when all readers are through with the message."""

RECORD = struct.Struct("@8Q")
"""position, descriptor, sequence, body length, timestamp, expires, extra, deliveries"""

NEW_RECORD = struct.Struct("@9Q")
"""The same and the first eight release bytes, which a new record has to clear."""

REFERENCE = struct.Struct("@4Q")

INVALID_POSITION = (1 << 64) - 1
"""Stored as the position of a record whose space was taken back, before anything is written over it."""

# kind
MESSAGE = 1
PAYLOAD = 2
JUMP = 3
JUMP_OTHER = 4

JUMP_TARGET_WORD = {JUMP: EXTRA_WORD, JUMP_OTHER: BODY_WORD}
"""Which word of a record holds the target of its JUMP."""

# state
RESERVED = 1
COMMITTED = 2
ABORTED = 3

# release byte: below DONE a message is still to be delivered
PENDING = 0
TAKEN = 1
RETURNED = 2
DONE = 3
FREE = 4
SET_ASIDE = 5
OFFERED = 6
"""What PENDING is in a queue's ring, in a topic's."""

DEATH = 1 << 32
"""What one consumer that died adds to the ``deliveries`` of a message."""

# where
IN_RECORD = 1
IN_RING = 2
IN_SPILL = 3

MAX_RING_SIZE = 1 << 36
MAX_LENGTH = (1 << 54) - ALIGN
_OFFSET_BITS = 30
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_POSITION_MASK = (1 << 34) - 1


def align(nbytes: int, to: int = ALIGN) -> int:
    """The next multiple of ``to`` (a power of two) that is at least ``nbytes``."""
    return (nbytes + to - 1) & -to


def descriptor(kind: int, state: int, length: int) -> int:
    """The word that holds a record's kind, state and length."""
    return length << 10 | state << 8 | kind


def pack_tail(position: int, offset: int) -> int:
    """The ``tail`` word for a record at this position and offset (both multiples of 64)."""
    return (position // ALIGN & _POSITION_MASK) << _OFFSET_BITS | offset // ALIGN


def tail_offset(word: int) -> int:
    """The offset that a ``tail`` word names."""
    return (word & _OFFSET_MASK) * ALIGN


def tail_names(word: int, position: int) -> bool:
    """Whether a ``tail`` word can stand for a record at this position."""
    return word >> _OFFSET_BITS == position // ALIGN & _POSITION_MASK


def reference_offset(where: int) -> tuple[int, int]:
    """Split the first word of a reference into (where, offset of the record)."""
    return where >> 56, where & ((1 << 56) - 1)
