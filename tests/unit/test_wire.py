"""The frames between producer and consumer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmq import ProtocolError, wire

words = st.integers(0, 2**64 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
frames = st.one_of(
    st.builds(wire.Hello, words, text),
    st.builds(wire.Welcome, words, text),
    st.builds(wire.Doorbell, text, words, words),
    st.builds(wire.Space, words),
    st.builds(wire.Goodbye, text),
)


@given(frames)
def test_a_frame_comes_back_as_it_went(frame: wire.Frame) -> None:
    assert wire.decode(wire.encode(frame)) == frame


@given(st.binary(max_size=200))
def test_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    try:
        frame = wire.decode(data)
    except ProtocolError as error:
        assert f"{len(data)} bytes" in str(error)  # noqa: PT017
    else:
        assert isinstance(frame, wire.Frame)


@given(frames, st.data())
def test_a_frame_that_was_cut_short_is_a_protocol_error(frame: wire.Frame, data: st.DataObject) -> None:
    whole = wire.encode(frame)
    with pytest.raises(ProtocolError):
        wire.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([0, 1, "ring"]),
        msgspec.msgpack.encode([6, 1, "ring"]),
        msgspec.msgpack.encode([1, "ring", 1]),
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode([3, "ring", -1.5, 0]),
        msgspec.msgpack.encode({"type": 1, "version": 1, "ring": "ring"}),
        msgspec.msgpack.encode([4, 1]) + b"more",
        b"\x92\x05\xa2\xff\xfe",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x05\xdb\xff\xff\xff\xff",
    ],
)
def test_what_is_no_frame_is_a_protocol_error_and_never_another(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="none of fmq's"):
        wire.decode(data)


def test_a_frame_begins_with_its_kind() -> None:
    kinds = [wire.Hello(1, "r"), wire.Welcome(1, ""), wire.Doorbell("r", 0, 0), wire.Space(1), wire.Goodbye("r")]
    assert [msgspec.msgpack.decode(wire.encode(frame))[0] for frame in kinds] == [1, 2, 3, 4, 5]
