"""Train the weights of ``engine.handlers.vision`` on drawn shapes, for some minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import engine.handlers.vision as vision
from engine import load_paddle

SEED = 7
_DRAWN = 128
"""Pixels of the side that shapes are drawn with, before they are made smaller."""

Picture = NDArray[np.uint8]


def draw(label: str, random: np.random.Generator, side: int = _DRAWN) -> Picture:
    """A shape somewhere on a ground, of any two colours that can be told apart, turned, with some noise."""
    ground = random.integers(0, 256, 3)
    colour = ground
    while int(np.abs(colour - ground).sum()) < 150:
        colour = random.integers(0, 256, 3)
    image = Image.new("RGB", (side, side), tuple(map(int, ground)))
    pen = ImageDraw.Draw(image)
    radius = side * random.uniform(0.18, 0.4)
    x, y = random.uniform(radius, side - radius, 2)
    fill = tuple(map(int, colour))
    turn = random.uniform(0, 2 * np.pi)

    def corner(angle: float, length: float = radius) -> tuple[float, float]:
        return x + length * np.cos(turn + angle), y + length * np.sin(turn + angle)

    box = (x - radius, y - radius, x + radius, y + radius)
    if label == "circle":
        pen.ellipse(box, fill=fill)
    elif label == "ring":
        pen.ellipse(box, outline=fill, width=max(3, int(radius * random.uniform(0.2, 0.35))))
    elif label == "cross":
        for angle in (0.0, np.pi / 2):
            pen.line([corner(angle), corner(angle + np.pi)], fill=fill, width=max(3, int(radius * 0.35)))
    else:
        count = {"square": 4, "triangle": 3}[label]
        pen.polygon([corner(2 * np.pi * number / count) for number in range(count)], fill=fill)
    pixels = np.asarray(image, np.float32) + random.normal(0, random.uniform(0, 12), (side, side, 3))
    return pixels.clip(0, 255).astype(np.uint8)


def _batch(random: np.random.Generator, size: int) -> tuple[Any, Any]:
    paddle = load_paddle()
    labels = random.integers(0, len(vision.LABELS), size)
    pictures = [paddle.to_tensor(draw(vision.LABELS[label], random)) for label in labels]
    return vision.see(pictures), paddle.to_tensor(labels)


def main(
    steps: Annotated[int, typer.Option(help="Batches to learn from.")] = 6000,
    size: Annotated[int, typer.Option(help="Pictures in a batch.")] = 32,
) -> None:
    """Train, say how well it does on pictures it has not seen, and write the weights."""
    paddle = load_paddle()
    paddle.seed(SEED)
    random = np.random.default_rng(SEED)
    network = vision.network()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(5e-3, steps)
    optimizer = paddle.optimizer.AdamW(rate, parameters=network.parameters())
    for step in range(steps):
        pictures, labels = _batch(random, size)
        loss = paddle.nn.functional.cross_entropy(network(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {float(loss):.3f}", flush=True)
    network.eval()
    pictures, labels = _batch(np.random.default_rng(SEED + 1), 500)
    right = int((network(pictures).argmax(axis=1) == labels).sum())
    print(f"{right} of 500 pictures that it had not seen are told right")
    weights = {name: value.numpy().astype(np.float16) for name, value in network.state_dict().items()}
    np.savez_compressed(Path(vision.__file__).with_suffix(".npz"), **weights)


if __name__ == "__main__":
    typer.run(main)
