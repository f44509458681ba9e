"""A small, real Paddle operation over the patches of a request: what each patch looks like, and whether all arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.tasks import Result, Task
from engine.tensors import load_paddle

ROWS = 256
"""Patches handled at a time, so that the float32 copies of uint8 pixels stay in the cache."""


def patch_stats(request: dict[str, Any]) -> dict[str, Any]:
    """Mean and standard deviation of each patch, and exact sums over pixels, token ids and position ids.

    ``request`` as made by ``api.make_request``, its arrays as tensors. Returns ``mean`` and ``std`` (float32 [n]) and
    the ints ``image_sum`` (modulo 2^32, of uint8 values or of the bits of float32), ``token_sum``, ``position_sum``.
    """
    paddle = load_paddle()
    inputs = request["multimodal_inputs"]
    images = inputs["images"]
    # Products with a column of 1/n: ten times as fast as Tensor.std here, which widens to float64.
    average = paddle.full([images.shape[1], 1], 1 / images.shape[1], dtype="float32")
    means, deviations, total = [], [], 0
    for start in range(0, images.shape[0], ROWS):
        rows = images[start : start + ROWS]
        is_float = rows.dtype == paddle.float32
        values = rows if is_float else rows.astype("float32")
        mean = paddle.matmul(values, average)
        centred = values - mean
        means.append(mean.numpy()[:, 0])
        deviations.append(paddle.matmul(centred * centred, average).sqrt().numpy()[:, 0])
        total += int((rows.view("int32") if is_float else rows).sum(dtype="int32"))
    return {
        "mean": np.concatenate(means),
        "std": np.concatenate(deviations),
        "image_sum": total % 2**32,
        "token_sum": int(request["prompt_token_ids"].sum()),
        "position_sum": int(inputs["position_ids"].sum()),
    }


class PatchStats:
    """Answers each request with its ``patch_stats``, one request a step."""

    takes_tensors = True

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        for task in tasks:
            value = patch_stats(task.inputs)
            yield [task.output(value, choice=choice) for choice in range(task.choices)]
