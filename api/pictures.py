"""Real requests: pictures cut into patches as vision-language servers do, and their prompts as tokens.

The shapes are those that FastDeploy's processors make: ERNIE-4.5-VL sends uint8 patches of 14 x 14 pixels, Qwen2.5-VL
normalised float32 patches over two frames, each with position ids that are the transposed view of a (3, n) array.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from api.errors import ApiError, PictureError

PATCH = 14
"""Pixels of a patch's side."""
MERGE = 2
"""Patches are merged in blocks of 2 x 2, so a picture's sides are multiples of 28 pixels."""
SIDE = PATCH * MERGE

_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
"""The mean and standard deviation of CLIP's training pictures (Radford et al. 2021), by colour."""

IMAGE_TOKEN = 256
"""Stands in the token ids once for each block of merged patches; 0 to 255 are the prompt's UTF-8 bytes."""

Picture = NDArray[np.uint8]
Kind = Literal["ernie", "qwen"]


def _crop(picture: Picture) -> Picture:
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise PictureError(f"a picture is uint8 [height, width, 3]; this one is {picture.dtype} {list(picture.shape)}")
    height, width = (size // SIDE * SIDE for size in picture.shape[:2])
    if not height or not width:
        raise PictureError(
            f"a picture has at least {SIDE} x {SIDE} pixels; this one has {picture.shape[0]} x {picture.shape[1]}"
        )
    return picture[:height, :width]


def _cut(frames: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """[frames, height, width, 3] to ([rows * columns, 3 * frames * 14 * 14], [[1, rows, columns]])."""
    count, height, width, colours = frames.shape
    rows, columns = height // PATCH, width // PATCH
    patches = frames.reshape(count, rows, PATCH, columns, PATCH, colours).transpose(1, 3, 5, 0, 2, 4)
    grid = np.array([[1, rows, columns]], np.int64)
    return patches.reshape(rows * columns, colours * count * PATCH * PATCH), grid


def ernie_patches(picture: Picture) -> dict[str, NDArray[Any]]:
    """``images`` uint8 [rows * columns, 588] and ``grid_thw`` int64 [1, 3] of a picture uint8 [height, width, 3].

    What exceeds a multiple of 28 pixels is cropped. Raises PictureError.
    """
    images, grid = _cut(_crop(picture)[np.newaxis])
    return {"images": images, "grid_thw": grid}


def qwen_patches(picture: Picture) -> dict[str, NDArray[Any]]:
    """``images`` float32 [rows * columns, 1176] and ``grid_thw`` int64 [1, 3]; the picture stands for two equal frames.

    Cropped as by ``ernie_patches``, scaled to 0..1 and normalised by colour. Raises PictureError.
    """
    normal = (_crop(picture).astype(np.float32) / np.float32(255) - _MEAN) / _STD
    images, grid = _cut(np.broadcast_to(normal, (2, *normal.shape)))
    return {"images": images, "grid_thw": grid}


def tokens(prompt: str, grid_thw: NDArray[np.int64]) -> NDArray[np.int64]:
    """Token ids int64 [n]: an IMAGE_TOKEN for each block of merged patches, then the bytes of the prompt."""
    blocks = int(grid_thw.prod(axis=1).sum()) // (MERGE * MERGE)
    text = np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)
    return np.concatenate([np.full(blocks, IMAGE_TOKEN, np.int64), text])


def position_ids(grid_thw: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Position ids int64 [length, 3] (frame, row, column), a transposed and so non-contiguous view.

    Blocks of merged patches count rows and columns; text goes on from the largest of them.
    """
    _, rows, columns = (int(size) for size in grid_thw[0] // [1, MERGE, MERGE])
    ids: NDArray[np.int64] = np.zeros((3, length), np.int64)
    ids[1, : rows * columns] = np.repeat(np.arange(rows), columns)
    ids[2, : rows * columns] = np.tile(np.arange(columns), rows)
    ids[:, rows * columns :] = max(rows, columns) + np.arange(length - rows * columns)
    return np.transpose(ids)


def make_request(picture: Picture, prompt: str, request_id: str, kind: Kind = "ernie") -> dict[str, Any]:
    """A request over one picture and a prompt, in the shape that FastDeploy's engine takes. Raises PictureError."""
    patches = {"ernie": ernie_patches, "qwen": qwen_patches}[kind](picture)
    ids = tokens(prompt, patches["grid_thw"])
    return {
        "request_id": request_id,
        "prompt": prompt,
        "prompt_token_ids": ids,
        "multimodal_inputs": {
            **patches,
            "image_type_ids": np.zeros(1, np.int64),
            "token_type_ids": (ids == IMAGE_TOKEN).astype(np.int64),
            "position_ids": position_ids(patches["grid_thw"], len(ids)),
            "image_patch_id": IMAGE_TOKEN,
        },
        "sampling_params": {"max_tokens": 128, "temperature": 0.7, "top_p": 0.9},
    }


_PROMPTS = {
    "astronaut.png": "Who is this, and what is behind her?",
    "chelsea.png": "What animal is this? Describe its fur.",
    "coffee.png": "Is there still coffee in the cup?",
    "rocket.jpg": "What is about to happen here, and at what time of day?",
    "motorcycle_left.png": "Which parts of the motorcycle can be seen?",
    "hubble_deep_field.jpg": "How many of these points are stars, and how many are galaxies?",
    "retina.jpg": "Is there anything unusual in this picture of an eye?",
    "page.png": "Read the text in the picture to me.",
}


def sample_pictures() -> list[tuple[Picture, str]]:
    """Pictures uint8 [height, width, 3] that scikit-image carries in its own package, each with a question about it.

    Nothing is downloaded. Raises ApiError if scikit-image is not installed.
    """
    try:
        import skimage
        from skimage.io import imread
    except ImportError as error:
        raise ApiError("the sample pictures come from scikit-image; install it: pip install 'shmq[dev]'") from error
    folder = os.path.join(os.path.dirname(skimage.__file__), "data")
    samples = []
    for name, prompt in _PROMPTS.items():
        picture = imread(os.path.join(folder, name))
        if picture.ndim == 2:
            picture = np.repeat(picture[:, :, np.newaxis], 3, axis=2)
        samples.append((np.ascontiguousarray(picture[:, :, :3], np.uint8), prompt))
    return samples
