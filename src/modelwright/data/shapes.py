"""The embedded image set: ten drawn shapes, made when they are read, so that the vision recipes run anywhere.

Two of the ten, the arrows, are each other's mirror image: a recipe that mirrors its training images cannot learn them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from modelwright.data.image_set import Array, ImageSet, ImageSplit

NAME = "shapes"
TRAIN, TEST = 3_000, 500
"""Pictures on each side, as many of each shape."""
SIZE = 32
DARK, LIGHT = (0, 80), (150, 255)
"""Ranges of the ground's and of the shape's colour, of 255."""
NOISE = 15.0
"""Standard deviation of what is added to every pixel, of 255."""
SPECKS = 2
"""Small squares that stand in the way in every picture."""

SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda x, y: x**2 + y**2 < 1,
    "ring": lambda x, y: (x**2 + y**2 < 1) & (x**2 + y**2 > 0.4),
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    "frame": lambda x, y: (np.maximum(abs(x), abs(y)) < 0.9) & (np.maximum(abs(x), abs(y)) > 0.55),
    "triangle-up": lambda x, y: (abs(x) < (y + 1) / 2) & (y < 0.8),
    "triangle-down": lambda x, y: (abs(x) < (1 - y) / 2) & (y > -0.8),
    "plus": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.28) & (np.maximum(abs(x), abs(y)) < 1),
    "cross": lambda x, y: (np.minimum(abs(x + y), abs(x - y)) < 0.4) & (np.maximum(abs(x), abs(y)) < 0.9),
    "arrow-left": lambda x, y: _arrow(x, y),
    "arrow-right": lambda x, y: _arrow(-x, y),
}
"""For each shape, whether a place belongs to it; it fills -1 to 1, and y grows downwards."""


def draw(seed: int = 0) -> ImageSplit:
    """The set, always the same: 32 × 32 in colour."""
    classes = tuple(SHAPES)
    labels = np.arange(TRAIN + TEST) % len(classes)
    random = np.random.Generator(np.random.Philox(seed))
    pictures = np.stack([_picture(SHAPES[classes[label]], random) for label in labels])
    whole = ImageSet(pictures, labels.astype(np.int64), classes, "shapes, drawn")
    return ImageSplit(
        replace(whole, images=whole.images[:TRAIN], labels=whole.labels[:TRAIN]),
        replace(whole, images=whole.images[TRAIN:], labels=whole.labels[TRAIN:]),
    )


def _arrow(x: Array, y: Array) -> Array:
    """An arrow that points to the left."""
    return ((x < 0) & (abs(y) < x + 1)) | ((x >= 0) & (x < 1) & (abs(y) < 0.3))


def _picture(inside: Callable[[Array, Array], Array], random: np.random.Generator) -> Array:
    """One shape somewhere, in some size and colour, with specks in the way and noise over all."""
    ground, ink = random.uniform(*DARK, 3), random.uniform(*LIGHT, 3)
    radius = random.uniform(8, 13)
    middle = random.uniform(radius - 2, SIZE - radius + 2, 2)
    down, across = np.mgrid[:SIZE, :SIZE] + 0.5
    mask = inside((across - middle[0]) / radius, (down - middle[1]) / radius)
    picture = np.where(mask[..., None], ink, ground)
    for left, top in random.integers(0, SIZE - 3, (SPECKS, 2)):
        picture[top : top + 3, left : left + 3] = random.uniform(0, 255, 3)
    return np.clip(picture + random.normal(0, NOISE, picture.shape), 0, 255).astype(np.uint8)
