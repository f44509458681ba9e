from __future__ import annotations

import pytest

from shmq import layout

TEBIBYTE = 1 << 40


@pytest.mark.parametrize(
    ("nbytes", "to", "aligned"),
    [
        (0, 64, 0),
        (1, 64, 64),
        (64, 64, 64),
        (65, 64, 128),
        (1, 4096, 4096),
        (4097, 4096, 8192),
        ((1 << 40) + 1, 8, (1 << 40) + 8),
    ],
)
def test_align_gives_the_next_multiple(nbytes: int, to: int, aligned: int) -> None:
    assert layout.align(nbytes, to) == aligned


def test_a_record_header_is_two_cache_lines() -> None:
    assert layout.RECORD.size == 64 == layout.RELEASE_BYTE
    assert layout.RECORD_BYTES == 128
    assert layout.NEW_RECORD.size == layout.RECORD.size + 8


def test_the_words_of_a_record_are_where_the_struct_puts_them() -> None:
    packed = layout.RECORD.pack(10, 11, 12, 13, 14, 15, 16, 17)
    words = memoryview(packed).cast("Q")
    assert words[layout.POSITION_WORD] == 10
    assert words[layout.DESCRIPTOR_WORD] == 11
    assert words[layout.EXTRA_WORD] == 16
    assert words[layout.DELIVERIES_WORD] == 17


def test_what_different_processes_write_lies_in_different_cache_line_pairs() -> None:
    producer = [layout.HEAD, layout.NEXT_SEQUENCE, layout.TAIL, layout.WANTED]
    consumer = [layout.EPOCH, layout.CONSUMER_PID, layout.ASLEEP]
    counted_by_producer = [
        layout.SPILLS,
        layout.SPILLED_BYTES,
        layout.STALLS,
        layout.HIGH_WATER,
        layout.TURNS,
        layout.FOLDS,
        layout.DOORBELLS,
    ]
    counted_by_consumer = [layout.REDELIVERED_COUNT, layout.EXPIRED_COUNT, layout.SET_ASIDE_COUNT]
    pairs = [
        {word * 8 // 128 for word in group} for group in (producer, consumer, counted_by_producer, counted_by_consumer)
    ]
    assert [len(pair) for pair in pairs] == [1, 1, 1, 1]
    assert len(set.union(*pairs)) == 4


def test_no_two_words_of_a_segment_header_share_a_place() -> None:
    words = [
        layout.MAGIC,
        layout.LAYOUT_VERSION,
        layout.HEADER_SIZE,
        layout.RING_SIZE,
        layout.RING_ID_BYTE // 8,
        layout.RING_ID_BYTE // 8 + 1,
        layout.OWNER_PID,
        layout.CREATED,
        *range(layout.NAME_BYTE // 8, (layout.NAME_BYTE + layout.NAME_BYTES) // 8),
        *range(layout.HEAD, layout.WANTED + 1),
        *range(layout.EPOCH, layout.ASLEEP + 1),
        *range(layout.SPILLS, layout.DOORBELLS + 1),
        *range(layout.REDELIVERED_COUNT, layout.SET_ASIDE_COUNT + 1),
    ]
    assert len(words) == len(set(words))
    assert max(words) < layout.HEADER_BYTES // 8


@pytest.mark.parametrize("kind", [layout.MESSAGE, layout.PAYLOAD, layout.JUMP])
@pytest.mark.parametrize("state", [layout.RESERVED, layout.COMMITTED, layout.ABORTED])
@pytest.mark.parametrize("length", [0, 128, 1 << 36, layout.MAX_LENGTH])
def test_a_descriptor_keeps_kind_state_and_length_apart(kind: int, state: int, length: int) -> None:
    word = layout.descriptor(kind, state, length)
    assert (word & 0xFF, word >> 8 & 3, word >> 10) == (kind, state, length)
    assert word < 1 << 64


@pytest.mark.parametrize("position", [0, 64, 1 << 32, TEBIBYTE - 64, TEBIBYTE, 5 * TEBIBYTE + 192])
@pytest.mark.parametrize("offset", [0, 64, 65536 - 128, layout.MAX_RING_SIZE - 128])
def test_a_tail_word_names_its_offset_and_its_position(position: int, offset: int) -> None:
    word = layout.pack_tail(position, offset)
    assert word < 1 << 64
    assert layout.tail_offset(word) == offset
    assert layout.tail_names(word, position)
    assert not layout.tail_names(word, position + 64)
    assert not layout.tail_names(word, position + TEBIBYTE // 2)


def test_a_reference_splits_into_where_and_offset() -> None:
    for where in (layout.IN_RECORD, layout.IN_RING, layout.IN_SPILL):
        offset = layout.MAX_RING_SIZE - 64
        assert layout.reference_offset(where << 56 | offset) == (where, offset)


def test_a_taken_back_position_can_be_no_position() -> None:
    assert layout.INVALID_POSITION % layout.ALIGN
    assert layout.INVALID_POSITION < 1 << 64
