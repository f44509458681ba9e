"""Whatever the default codec takes, and what it does not, comes back from a pickle as it was; damage is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fmq import pickling
from fmq.errors import DecodeError
from tests.property.test_codec_roundtrip import arrays, leaves, normal, trees, views_of, whole_arrays

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def round_trip(obj: Any) -> Any:
    encoded = pickling.encode(obj)
    assert all(buffer.nbytes for buffer in encoded.buffers)
    return pickling.decode(encoded.blob, views_of(encoded.buffers))


@given(trees)
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    before = normal(tree)
    assert normal(round_trip(tree)) == before
    assert normal(tree) == before


class Thing:
    """Holds anything."""

    def __init__(self, held: Any) -> None:
        self.held = held


@given(leaves)
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
def test_what_an_object_holds_comes_back_as_it_was(held: Any) -> None:
    found = round_trip({"things": [Thing(held), Thing([held])]})["things"]
    assert normal([found[0].held, found[1].held[0]]) == normal([held, held])


@given(st.lists(arrays(), max_size=4))
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
def test_arrays_come_back_bit_by_bit_in_c_order_and_read_only(some: list[NDArray[Any]]) -> None:
    found = round_trip(some)
    assert [normal(array) for array in found] == [normal(array) for array in some]
    assert all(array.flags.c_contiguous and array.flags.aligned for array in found)
    assert not any(array.flags.writeable for array in found)


@given(whole_arrays(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_buffer_is_stored_once_if_and_only_if_it_is_the_same(array: NDArray[Any], data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from([array, array[...], array.copy()]), min_size=1, max_size=6))
    encoded = pickling.encode(some)
    assert len(encoded.buffers) == (len({each.ctypes.data for each in some}) if array.nbytes else 0)


SAMPLE = {
    "a": np.arange(600).reshape(2, 300),
    "b": [Thing(b"x" * 5000), {1, 2}, bytearray(5000), "text" * 50],
    "c": np.zeros(3, [("x", "<i4"), ("y", "<f8")]),
}
BLOB, BUFFERS = pickling.encode(SAMPLE)
VIEWS = views_of(BUFFERS)


def test_a_pickle_that_was_cut_is_refused_wherever_it_was_cut() -> None:
    for length in range(len(BLOB)):
        with pytest.raises(DecodeError) as raised:
            pickling.decode(BLOB[:length], VIEWS)
        assert raised.value.__cause__ is not None, length


@given(st.integers(0, len(VIEWS) - 1))
@settings(max_examples=20, deadline=None)
def test_a_pickle_with_buffers_missing_is_refused(count: int) -> None:
    with pytest.raises(DecodeError):
        pickling.decode(BLOB, VIEWS[:count])
