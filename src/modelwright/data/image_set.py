"""Labelled images as two arrays, and decoded ones kept in a cache so that a second start costs nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.errors import DataError, Problem
from modelwright.runs.caches import cache_dir

Array = np.ndarray[Any, np.dtype[Any]]
VERSION = 1
"""Raised when decoding changes, so that an old cache is not taken for a new one."""


@dataclass(frozen=True)
class ImageSet:
    """Images of one size with their classes, and where they came from."""

    images: Array
    """[count, height, width, channels] uint8."""
    labels: Array
    """[count] int64, a place in `classes` for each image."""
    classes: tuple[str, ...]
    """Names of the classes."""
    source: str
    """A sentence to stand beside every accuracy, such as "CIFAR-10, lossy JPEG npz"."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, count: int) -> ImageSet:
        """Fewer images, evenly spread over the set: sets sorted by class keep all their classes."""
        if count >= len(self):
            return self
        rows = np.arange(count) * len(self) // count
        return ImageSet(self.images[rows], self.labels[rows], self.classes, self.source)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, on the scale 0 to 1; counted, so the same on every machine."""
        values = np.arange(256) / 255.0
        means, deviations = [], []
        for channel in range(self.images.shape[3]):
            counts = np.bincount(self.images[..., channel].ravel(), minlength=256)
            mean = float((counts * values).sum() / counts.sum())
            variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
            means.append(mean)
            deviations.append(max(variance**0.5, 1.0 / 255.0))  # a channel of one colour would divide by zero
        return tuple(means), tuple(deviations)


@dataclass(frozen=True)
class ImageSplit:
    """What the model learns from and what is held out."""

    train: ImageSet
    """Images that move the weights."""
    test: ImageSet
    """Images that only measure."""

    def fingerprint(self) -> str:
        """Hash of every pixel, label and class name on both sides, in order."""
        digest = xxhash.xxh3_128(json.dumps(self.train.classes).encode())
        for side in (self.train, self.test):
            digest.update(f"{side.images.shape}".encode())
            digest.update(np.ascontiguousarray(side.images).data)
            digest.update(np.ascontiguousarray(side.labels).data)
        return digest.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """What the model sees, in numbers."""
        return {
            "source": self.train.source,
            "train_rows": len(self.train),
            "held_out_rows": len(self.test),
            "images_on_both_sides": len(_distinct(self.train) & _distinct(self.test)),
            "image": list(self.train.images.shape[1:]),
            "classes": list(self.train.classes),
            "fingerprint": self.fingerprint(),
        }


def check(split: ImageSplit, where: str) -> ImageSplit:
    """Hold a set that was just read against what training takes; every problem is told at once."""
    problems: list[Problem] = []
    for name, side in (("training", split.train), ("test", split.test)):
        if not len(side):
            problems.append(Problem(where, f"there is no {name} image in it"))
        elif int(side.labels.max()) >= len(split.train.classes):
            found = f"a {name} label is {int(side.labels.max())}, but there are {len(split.train.classes)} classes"
            problems.append(Problem(where, f"{found}; it wants labels from 0 to {len(split.train.classes) - 1}"))
    shapes = [side.images.shape[1:] for side in (split.train, split.test)]
    if not problems and shapes[0] != shapes[1]:
        letter = f"training images are {describe(shapes[0])} and test images {describe(shapes[1])}; it wants one size"
        problems.append(Problem(where, letter))
    if problems:
        raise DataError(problems)
    return split


def describe(shape: tuple[int, ...]) -> str:
    """The size of an image for people: width × height × channels."""
    height, width, channels = shape
    return f"{width} × {height} × {channels}"


def cached(key: str, make: Callable[[], ImageSplit]) -> ImageSplit:
    """The set of that key out of the cache, or made now and kept; a cache that cannot be trusted is made anew."""
    folder = cache_dir() / f"images-v{VERSION}-{key}"
    with suppress(OSError, ValueError, KeyError):
        return _read(folder)
    split = make()
    with suppress(OSError):  # a full or read-only disk costs the next start some seconds, and nothing else
        _write(split, folder)
    return split


def _read(folder: Path) -> ImageSplit:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    sides = []
    for side in ("train", "test"):
        arrays = []
        for part in ("images", "labels"):
            with (folder / f"{side}_{part}.npy").open("rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            if xxhash.xxh3_128_hexdigest(array.data) != facts["hashes"][f"{side}_{part}"]:
                raise ValueError(f"{folder} holds a flipped bit")
            arrays.append(array)
        sides.append(ImageSet(arrays[0], arrays[1], tuple(facts["classes"]), facts["source"]))
    return ImageSplit(*sides)


def _write(split: ImageSplit, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        hashes = {}
        for name, side in (("train", split.train), ("test", split.test)):
            for part, array in (("images", side.images), ("labels", side.labels)):
                whole = np.ascontiguousarray(array)
                hashes[f"{name}_{part}"] = xxhash.xxh3_128_hexdigest(whole.data)
                with (partial / f"{name}_{part}.npy").open("wb") as file:
                    np.lib.format.write_array(file, whole, allow_pickle=False)
        facts = {"classes": split.train.classes, "source": split.train.source, "hashes": hashes}
        (partial / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # what is there could not be read
        partial.rename(folder)  # without fsync: a cache cut short by a power failure is found by its hashes
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _distinct(side: ImageSet) -> set[int]:
    """A hash of each image."""
    return {xxhash.xxh3_64_intdigest(image.data) for image in np.ascontiguousarray(side.images)}
