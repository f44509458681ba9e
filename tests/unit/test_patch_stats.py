"""The engine's Paddle operation finds what numpy finds."""

from __future__ import annotations

import numpy as np
import pytest

from api import make_request
from engine import to_paddle
from engine.handlers.patch_stats import ROWS, patch_stats
from examples.patch_check import compare_stats, expected_stats

pytest.importorskip("paddle")


@pytest.mark.parametrize("kind", ["ernie", "qwen"])
@pytest.mark.parametrize("side", [28, 300])
def test_paddle_and_numpy_agree(kind: str, side: int) -> None:
    picture = np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)
    request = make_request(picture, "agree?", "r", kind)
    request["multimodal_inputs"]["position_ids"] = np.ascontiguousarray(request["multimodal_inputs"]["position_ids"])
    found = patch_stats(to_paddle(request))
    assert compare_stats(found, expected_stats(request))


def test_more_patches_than_are_handled_at_a_time_are_all_counted() -> None:
    side = 28 * 12
    assert (side // 14) ** 2 > ROWS
    picture = np.full((side, side, 3), 7, np.uint8)
    request = make_request(picture, "all?", "r", "ernie")
    request["multimodal_inputs"]["position_ids"] = np.ascontiguousarray(request["multimodal_inputs"]["position_ids"])
    found = patch_stats(to_paddle(request))
    assert found["mean"].shape == ((side // 14) ** 2,)
    assert found["image_sum"] == side * side * 3 * 7
