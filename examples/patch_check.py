"""What an engine has to answer to a request, computed by numpy alone, and the comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE = 1e-4
"""Largest difference of a mean or deviation, relative to the largest value: float32 sums in another order."""


def expected_stats(request: dict[str, Any]) -> dict[str, Any]:
    """The mean and standard deviation of each patch (float32 [n]) and the exact sums that tell every byte arrived.

    The same as ``engine.patch_stats`` finds with Paddle: ``mean``, ``std``, ``image_sum`` (modulo 2^32, of
    uint8 values or of the bits of float32), ``token_sum`` and ``position_sum``.
    """
    inputs = request["multimodal_inputs"]
    images = inputs["images"]
    values = images.astype(np.float32) if images.dtype != np.float32 else images
    bits = images.view(np.int32) if images.dtype == np.float32 else images
    return {
        "mean": values.mean(axis=1),
        "std": values.std(axis=1),
        "image_sum": int(bits.sum(dtype=np.int64)) % 2**32,
        "token_sum": int(request["prompt_token_ids"].sum()),
        "position_sum": int(inputs["position_ids"].sum()),
    }


def compare_stats(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two results agree: sums exactly, means and deviations within rounding."""
    if found.keys() != expected.keys():
        return False
    for name, value in expected.items():
        if isinstance(value, int):
            if found[name] != value:
                return False
        elif found[name].shape != value.shape or not np.allclose(
            found[name], value, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(np.abs(value).max()))
        ):
            return False
    return True
