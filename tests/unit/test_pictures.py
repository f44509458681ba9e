"""Pictures are cut into patches as vision-language servers do."""

from __future__ import annotations

import numpy as np
import pytest

from api import PictureError, ernie_patches, make_request, qwen_patches, sample_pictures
from api.pictures import IMAGE_TOKEN
from examples.patch_check import compare_stats, expected_stats


def picture(height: int = 60, width: int = 90) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)


def test_an_ernie_patch_holds_the_pixels_of_its_square() -> None:
    source = picture()
    patches = ernie_patches(source)
    assert patches["grid_thw"].tolist() == [[1, 4, 6]]
    assert patches["images"].shape == (24, 588)
    assert patches["images"].dtype == np.uint8
    row, column = 2, 5
    square = source[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
    np.testing.assert_array_equal(patches["images"][row * 6 + column], square.transpose(2, 0, 1).ravel())


def test_a_qwen_patch_holds_the_normalised_square_twice() -> None:
    source = picture()
    patches = qwen_patches(source)
    assert patches["images"].shape == (24, 1176)
    assert patches["images"].dtype == np.float32
    frames = patches["images"].reshape(24, 3, 2, 14, 14)
    np.testing.assert_array_equal(frames[:, :, 0], frames[:, :, 1])
    red = (source[0, 0, 0] / 255 - 0.48145466) / 0.26862954
    assert frames[0, 0, 0, 0, 0] == pytest.approx(red, rel=1e-5)


@pytest.mark.parametrize("bad", [np.zeros((40, 40), np.uint8), np.zeros((40, 40, 3)), np.zeros((20, 40, 3), np.uint8)])
def test_what_is_no_picture_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(PictureError):
        ernie_patches(bad)


@pytest.mark.parametrize("kind", ["ernie", "qwen"])
def test_a_request_has_the_shapes_that_an_engine_expects(kind: str) -> None:
    request = make_request(picture(), "What is it?", "r1", kind)
    inputs, ids = request["multimodal_inputs"], request["prompt_token_ids"]
    assert ids.dtype == np.int64
    assert ids.tolist() == [IMAGE_TOKEN] * 6 + list(b"What is it?")
    assert inputs["position_ids"].shape == (len(ids), 3)
    assert not inputs["position_ids"].flags.c_contiguous
    assert inputs["position_ids"][:6].tolist() == [[0, r, c] for r in range(2) for c in range(3)]
    assert inputs["position_ids"][6].tolist() == [3, 3, 3]
    assert inputs["token_type_ids"].sum() == 6


def test_the_samples_are_real_pictures_of_several_sizes() -> None:
    samples = sample_pictures()
    assert len(samples) >= 6
    assert len({picture.shape for picture, _ in samples}) >= 5
    assert all(picture.std() > 10 and prompt for picture, prompt in samples)


def test_the_check_notices_one_changed_byte() -> None:
    request = make_request(picture(), "x", "r", "ernie")
    expected = expected_stats(request)
    assert compare_stats(expected_stats(request), expected)
    request["multimodal_inputs"]["images"][3, 5] ^= 1
    assert not compare_stats(expected_stats(request), expected)


def test_the_check_notices_a_changed_mean() -> None:
    request = make_request(picture(), "x", "r", "qwen")
    expected = expected_stats(request)
    changed = {**expected, "mean": expected["mean"] + 0.01}
    assert not compare_stats(changed, expected)
    assert not compare_stats({**expected, "mean": expected["mean"][:-1]}, expected)
    assert not compare_stats({}, expected)
