"""Read image classification datasets as arrays: CIFAR-10, npz of JPEGs, IDX files, folders, drawn shapes."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data.array_cache import ArrayEntry, load_or_compute
from modelwright.data.download import RemoteFile, download, sha256_file
from modelwright.data.packing import NDArray
from modelwright.data.readers import group_problems
from modelwright.data.sources import CIFAR10_NAME, FSCK_DIR, did_you_mean, local_path
from modelwright.errors import DataError, Problem, UsageError
from modelwright.runs.caches import cache_dir, is_offline
from modelwright.runs.folder import hash_file

DECODE_CACHE_VERSION = 1
"""Raise it when decoding changes, so that older caches are not read."""


@dataclass(frozen=True)
class ImageDataset:
    """Images of one size, with labels, class names and source."""

    images: NDArray
    """[count, height, width, channels] uint8."""
    labels: NDArray
    """[count] int64, an index into `classes` for each image."""
    classes: tuple[str, ...]
    """Names of the classes."""
    source: str
    """A description shown with every accuracy, such as "CIFAR-10, lossy JPEG npz"."""

    def __len__(self) -> int:
        return len(self.labels)

    def subsample(self, count: int) -> ImageDataset:
        """Evenly spaced images, so that a dataset sorted by class keeps all classes."""
        if count >= len(self):
            return self
        rows = np.arange(count) * len(self) // count
        return ImageDataset(self.images[rows], self.labels[rows], self.classes, self.source)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation per channel, scaled to 0..1; by histogram, so equal on every machine."""
        values = np.arange(256) / 255.0
        means, deviations = [], []
        for channel in range(self.images.shape[3]):
            counts = np.bincount(self.images[..., channel].ravel(), minlength=256)
            mean = float((counts * values).sum() / counts.sum())
            variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
            means.append(mean)
            deviations.append(max(variance**0.5, 1.0 / 255.0))  # avoids division by zero for a constant channel
        return tuple(means), tuple(deviations)


@dataclass(frozen=True)
class ImageSplits:
    """Training and test images."""

    train: ImageDataset
    """Images to train on."""
    test: ImageDataset
    """Images for evaluation only."""

    def fingerprint(self) -> str:
        """Hash of every pixel, label and class name of both splits, in order."""
        digest = xxhash.xxh3_128(json.dumps(self.train.classes).encode())
        for dataset in (self.train, self.test):
            digest.update(f"{dataset.images.shape}".encode())
            digest.update(np.ascontiguousarray(dataset.images).data)
            digest.update(np.ascontiguousarray(dataset.labels).data)
        return digest.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """Source, row counts and fingerprint, for the data manifest."""
        train, test = ({xxhash.xxh3_64_intdigest(image.data) for image in np.ascontiguousarray(dataset.images)}
                       for dataset in (self.train, self.test))  # fmt: skip
        return {
            "source": self.train.source,
            "train_rows": len(self.train),
            "held_out_rows": len(self.test),
            "images_in_both_splits": len(train & test),
            "image": list(self.train.images.shape[1:]),
            "classes": list(self.train.classes),
            "fingerprint": self.fingerprint(),
        }


def validate_images(splits: ImageSplits, where: str) -> ImageSplits:
    """Check a dataset that was just read; all problems are raised as one error."""
    problems: list[Problem] = []
    for name, dataset in (("training", splits.train), ("test", splits.test)):
        if not len(dataset):
            problems.append(Problem(where, f"there is no {name} image in it"))
        elif int(dataset.labels.max()) >= len(splits.train.classes):
            count = len(splits.train.classes)
            problem = f"a {name} label is {int(dataset.labels.max())}, but there are {count} classes"
            problems.append(Problem(where, f"{problem}; it wants labels from 0 to {count - 1}"))
    train, test = (dataset.images.shape[1:] for dataset in (splits.train, splits.test))
    if not problems and train != test:
        sizes = f"training images are {format_image_size(train)} and test images {format_image_size(test)}"
        problems.append(Problem(where, f"{sizes}; it wants one size"))
    if problems:
        raise DataError(problems)
    return splits


def format_image_size(shape: tuple[int, ...]) -> str:
    """Image size as width × height × channels."""
    height, width, channels = shape
    return f"{width} × {height} × {channels}"


def load_or_decode(key: str, decode: Callable[[], ImageSplits]) -> ImageSplits:
    """Read the decoded dataset from the cache, or decode and cache it."""

    def compute() -> ArrayEntry:
        splits = decode()
        datasets = {"train": splits.train, "test": splits.test}
        arrays = {f"{name}_images": dataset.images for name, dataset in datasets.items()}
        arrays |= {f"{name}_labels": dataset.labels for name, dataset in datasets.items()}
        return arrays, {"classes": splits.train.classes, "source": splits.train.source}

    arrays, facts = load_or_compute(f"images-v{DECODE_CACHE_VERSION}", key, compute)
    classes, source = tuple(facts["classes"]), facts["source"]
    return ImageSplits(*(ImageDataset(arrays[f"{name}_images"], arrays[f"{name}_labels"], classes, source)
                         for name in ("train", "test")))  # fmt: skip


CIFAR10_ARCHIVE = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",  # md5 c32a1d4ab5d03f1284b67883e8d87530
)
CIFAR10_CLASSES = (*("airplane", "automobile", "bird", "cat", "deer"), *("dog", "frog", "horse", "ship", "truck"))
BINARY_FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
"""Bytes of one CIFAR-10 record: label, then red, green and blue planes."""
MAX_CIFAR_RECORDS = 10_000
"""Records in one CIFAR-10 file."""
NPZ_ARRAYS = ("jpeg_header", "classes", "train_scans", "train_lengths", "train_labels",
              "test_scans", "test_lengths", "test_labels")  # fmt: skip
IDX_NAME = re.compile(r"(train|t10k|test)[-_](images|labels)[-.]idx\d-ubyte(\.gz)?$")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
HELD_OUT_EVERY = 10
"""Every tenth image of a folder without test split is held out."""
DECODE_BATCH = 256
"""Images per decoding task of a thread."""


def reject_pickles(path: Path) -> None:
    """Reject the pickled form of CIFAR-10: reading a pickle can run any code."""
    inside = path.is_dir() and ((path / "batches.meta").exists() or (path / "data_batch_1").exists())
    if inside or path.name in ("cifar-10-batches-py", "cifar-10-python.tar.gz") or path.suffix in (".pkl", ".pickle"):
        message = "this is a pickle, which may run any code when it is read; it wants the binary form of CIFAR-10"
        raise DataError([Problem(str(path), f"{message}: {CIFAR10_ARCHIVE.name} from {CIFAR10_ARCHIVE.url}")])


def reject_incomplete(folder: Path) -> None:
    """Reject a folder with only some of the files of CIFAR-10."""
    if missing := [name for name in (*TRAIN_FILES, TEST_FILE) if not (folder / name).is_file()]:
        raise DataError([Problem(str(folder), f"there is no {', '.join(missing)}; it wants the whole binary form")])


def read_binary_folder(folder: Path) -> ImageSplits:
    """CIFAR-10 in its binary form, unpacked."""
    reject_incomplete(folder)
    class_names_file = folder / "batches.meta.txt"
    classes: tuple[str, ...] = CIFAR10_CLASSES
    if class_names_file.is_file():
        classes = tuple(class_names_file.read_text(encoding="utf-8").split())
    return _from_records({name: (folder / name).read_bytes() for name in (*TRAIN_FILES, TEST_FILE)}, classes, folder)


def read_binary_archive(path: Path, published: RemoteFile = CIFAR10_ARCHIVE) -> ImageSplits:
    """CIFAR-10 in its binary form, as the published archive; decoded once, then cached."""

    def unpack() -> ImageSplits:
        if (digest := sha256_file(path)) != published.checksum:
            message = f"its sha256 is {digest}, and that of the published archive {published.checksum}"
            raise DataError([Problem(str(path), f"{message}; download it again, or unpack it and name the folder")])
        return _from_records(_read_archive_members(path), CIFAR10_CLASSES, path)

    return load_or_decode(hash_file(path), unpack)


def _read_archive_members(path: Path) -> dict[str, bytes]:
    """The six data files of the archive; other members are ignored, and nothing is extracted to disk."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name, small = Path(member.name).name, member.size <= CIFAR_RECORD_BYTES * MAX_CIFAR_RECORDS
                if name in (*TRAIN_FILES, TEST_FILE) and member.isreg() and small:
                    opened = archive.extractfile(member)
                    files[name] = opened.read() if opened else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError([Problem(str(path), f"this is no whole archive ({error}); download it again")]) from None
    if missing := [name for name in (*TRAIN_FILES, TEST_FILE) if name not in files]:
        message = f"there is no {', '.join(missing)} in it; it wants {CIFAR10_ARCHIVE.name}"
        raise DataError([Problem(str(path), message)])
    return files


def _from_records(files: dict[str, bytes], classes: tuple[str, ...], where: Path) -> ImageSplits:
    wanted = f"it wants records of {CIFAR_RECORD_BYTES:,} bytes each"
    sizes = {name: len(data) for name, data in files.items() if not data or len(data) % CIFAR_RECORD_BYTES}
    if problems := [Problem(str(where / name), f"it holds {size:,} bytes; {wanted}") for name, size in sizes.items()]:
        raise DataError(problems)

    def read_split(*names: str) -> ImageDataset:
        records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, CIFAR_RECORD_BYTES)
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = records[:, 0].astype(np.int64)
        return ImageDataset(np.ascontiguousarray(images), labels, classes, "CIFAR-10, original binary form")

    return validate_images(ImageSplits(read_split(*TRAIN_FILES), read_split(TEST_FILE)), str(where))


def read_jpeg_npz(path: Path) -> ImageSplits:
    """JPEGs with one common header, as {train,test}_{scans,lengths,labels}; decoded once, then cached."""

    def decode() -> ImageSplits:
        try:
            with zipfile.ZipFile(path) as archive:
                arrays = {name.removesuffix(".npy"): _read_npy(archive, name) for name in archive.namelist()}
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
            raise DataError([Problem(str(path), f"this is no whole npz of plain arrays ({error})")]) from None
        if missing := [name for name in NPZ_ARRAYS if name not in arrays]:
            message = f"there is no array {', '.join(missing)}; the arrays are {', '.join(sorted(arrays)) or 'none'}"
            raise DataError([Problem(str(path), message)])
        train, test = (_decode_jpeg_split(arrays, split, path) for split in ("train", "test"))
        return validate_images(ImageSplits(train, test), str(path))

    return load_or_decode(hash_file(path), decode)


def _read_npy(archive: zipfile.ZipFile, name: str) -> NDArray:
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _decode_jpeg_split(arrays: dict[str, NDArray], split: str, path: Path) -> ImageDataset:
    header, scans = arrays["jpeg_header"].tobytes(), arrays[f"{split}_scans"].tobytes()
    lengths, labels = arrays[f"{split}_lengths"].astype(np.int64), arrays[f"{split}_labels"].astype(np.int64)
    if lengths.sum() != len(scans) or len(lengths) != len(labels):
        lengths_text = f"{len(lengths):,} lengths that make {lengths.sum():,} bytes"
        message = f"the {split} split does not add up: {len(labels):,} labels, {lengths_text}, {len(scans):,} bytes"
        raise DataError([Problem(str(path), message)])
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    names = [f"{path.name} {split} image {number}" for number in range(len(labels))]
    images = _decode_images(names, lambda row: header + scans[starts[row] : ends[row]], formats=("JPEG",))
    classes = tuple(str(name) for name in arrays["classes"].tolist())
    dataset_name = "CIFAR-10" if classes == CIFAR10_CLASSES else path.name
    return ImageDataset(images, labels, classes, f"{dataset_name}, lossy JPEG npz")


def read_idx_folder(folder: Path) -> ImageSplits:
    """MNIST-like IDX files, gzipped or plain."""
    parts: dict[tuple[str, str], NDArray] = {}
    for path in sorted(folder.iterdir()):
        if match := IDX_NAME.search(path.name):
            parts["train" if match[1] == "train" else "test", match[2]] = _read_idx(path)
    wanted = [(split, part) for split in ("train", "test") for part in ("images", "labels")]
    if missing := [f"{split} {part}" for split, part in wanted if (split, part) not in parts]:
        raise DataError([Problem(str(folder), f"there is no IDX file with the {' and the '.join(missing)}")])
    for split in ("train", "test"):
        images, labels = parts[split, "images"], parts[split, "labels"]
        if images.ndim not in (3, 4) or labels.ndim != 1 or len(images) != len(labels):
            message = f"the {split} images are {list(images.shape)} and the labels {list(labels.shape)}"
            raise DataError([Problem(str(folder), f"{message}; it wants [count, height, width] and [count]")])
    max_label = max(parts[split, "labels"].max(initial=0) for split in ("train", "test"))
    classes, source = tuple(str(number) for number in range(max_label + 1)), f"{folder.name}, IDX files"
    train, test = (
        ImageDataset(images if images.ndim == 4 else images[..., None], labels.astype(np.int64), classes, source)
        for images, labels in ((parts[split, "images"], parts[split, "labels"]) for split in ("train", "test"))
    )
    return validate_images(ImageSplits(train, test), str(folder))


def _read_idx(path: Path) -> NDArray:
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:3] != b"\0\0\x08":
                raise DataError([Problem(str(path), "this is no IDX file of bytes; it wants one that begins 00 00 08")])
            shape = tuple(np.frombuffer(file.read(4 * magic[3]), ">u4").tolist())
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError([Problem(str(path), f"this is no whole gzip file ({error})")]) from None
    if len(shape) != magic[3] or len(data) != math.prod(shape):
        problem = f"its head says {' × '.join(map(str, shape))}, and {len(data):,} bytes follow"
        raise DataError([Problem(str(path), f"{problem}; it wants {math.prod(shape):,}")])
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape)


def read_image_folder(folder: Path) -> ImageSplits:
    """Images in one folder per class, below train/ and test/ (or val/), or split by content if those do not exist.

    All images must be of one size. Decoded once, then cached.
    """
    split_dirs = find_split_dirs(folder)
    train, test = _list_images(folder), list[Path]()
    if split_dirs:
        train, test = (_list_images(folder / name) for name in split_dirs)
    classes = tuple(sorted({path.parent.name for path in (*train, *test)}))
    if not train or len(classes) < 2:
        summary = f"data: {folder} holds {len(train)} training images in {len(classes)} classes"
        raise UsageError(f"{summary}; it wants one subfolder of images per class, two at the least")
    stats = [(path, path.stat()) for path in (*train, *test)]
    listing = [f"{path.relative_to(folder)}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats]
    key = xxhash.xxh3_128_hexdigest(f"{folder.name}:{listing}".encode())

    def decode() -> ImageSplits:
        source = f"{folder.name}, folder of images" + ("" if split_dirs else f", one in {HELD_OUT_EVERY} held out")
        split_paths = (train, test) if split_dirs else _split_by_content(train)
        datasets = [_decode_folder_split(paths, classes, source) for paths in split_paths]
        return validate_images(ImageSplits(*datasets), str(folder))

    return load_or_decode(key, decode)


def find_split_dirs(folder: Path) -> tuple[str, str] | None:
    """The names of the train and test folders, if both exist."""
    for test in ("test", "val", "valid", "validation"):
        if (folder / "train").is_dir() and (folder / test).is_dir():
            return "train", test
    return None


def _list_images(folder: Path) -> list[Path]:
    """All images of the class folders, sorted by name."""
    class_dirs = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [path for class_dir in class_dirs for path in sorted(class_dir.iterdir())
            if path.suffix.lower() in IMAGE_SUFFIXES]  # fmt: skip


def _split_by_content(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Split by a hash of the content, so that copies of an image are in one split."""
    hashes = {path: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in paths}
    distinct = sorted(set(hashes.values()))
    chosen = set(distinct[: max(1, len(distinct) // HELD_OUT_EVERY)])
    return [p for p in paths if hashes[p] not in chosen], [p for p in paths if hashes[p] in chosen]


def _decode_folder_split(paths: Sequence[Path], classes: tuple[str, ...], source: str) -> ImageDataset:
    images = _decode_images([f"{path.parent.name}/{path.name}" for path in paths], lambda row: paths[row].read_bytes())
    labels = np.array([classes.index(path.parent.name) for path in paths], dtype=np.int64)
    return ImageDataset(images, labels, classes, source)


def _decode_images(
    names: Sequence[str], data: Callable[[int], bytes], formats: tuple[str, ...] | None = None
) -> NDArray:
    """Decode images of one size into one array on all cores; invalid images are raised as one error."""
    from PIL import Image, ImageOps

    def decode(rows: range) -> Iterator[NDArray | str]:
        for row in rows:
            try:
                with Image.open(io.BytesIO(data(row)), formats=formats) as image:
                    yield np.asarray((ImageOps.exif_transpose(image) if formats is None else image).convert("RGB"))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                yield f"this is no whole image ({error})"

    batches = [range(start, min(start + DECODE_BATCH, len(names))) for start in range(0, len(names), DECODE_BATCH)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        decoded = [image for batch in threads.map(lambda batch: list(decode(batch)), batches) for image in batch]
    shape = next((image.shape for image in decoded if not isinstance(image, str)), (0, 0, 3))
    problems = [Problem(name, image) for name, image in zip(names, decoded, strict=True) if isinstance(image, str)]
    for name, image in zip(names, decoded, strict=True):
        if not isinstance(image, str) and image.shape != shape:
            message = f"it is {image.shape[1]} × {image.shape[0]} and the first image {shape[1]} × {shape[0]}"
            problems.append(Problem(name, f"{message}; it wants one size"))
    if problems:
        raise DataError(group_problems(problems, "images"))
    images = [image for image in decoded if not isinstance(image, str)]
    return np.stack(images) if images else np.zeros((0, *shape), np.uint8)


SHAPES_NAME = "shapes"
SHAPES_TRAIN, SHAPES_TEST = 3_000, 500
"""Images per split, equally many of each shape."""
SHAPES_PIXELS = 32
BACKGROUND, FOREGROUND = (0, 80), (150, 255)
"""Color ranges of background and shape, of 255."""
NOISE_STD = 15.0
"""Standard deviation of the noise, of 255."""
DISTRACTORS = 2
"""Small random squares in every image."""
SHAPES: dict[str, Callable[[NDArray, NDArray], NDArray]] = {
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
"""For each shape, whether a point is inside; coordinates are -1 to 1, y downwards."""


def make_shapes_dataset(seed: int = 0) -> ImageSplits:
    """Drawn shapes, 32 × 32 RGB; the same seed gives the same images."""
    classes = tuple(SHAPES)
    labels = np.arange(SHAPES_TRAIN + SHAPES_TEST) % len(classes)
    rng = np.random.Generator(np.random.Philox(seed))
    images = np.stack([_draw_shape(SHAPES[classes[label]], rng) for label in labels])
    dataset = ImageDataset(images, labels.astype(np.int64), classes, "shapes, drawn")
    return ImageSplits(
        replace(dataset, images=dataset.images[:SHAPES_TRAIN], labels=dataset.labels[:SHAPES_TRAIN]),
        replace(dataset, images=dataset.images[SHAPES_TRAIN:], labels=dataset.labels[SHAPES_TRAIN:]),
    )


def _arrow(x: NDArray, y: NDArray) -> NDArray:
    """An arrow that points to the left."""
    return ((x < 0) & (abs(y) < x + 1)) | ((x >= 0) & (x < 1) & (abs(y) < 0.3))


def _draw_shape(inside: Callable[[NDArray, NDArray], NDArray], rng: np.random.Generator) -> NDArray:
    """One shape of random position, size and color, with distractors and noise."""
    background, foreground = rng.uniform(*BACKGROUND, 3), rng.uniform(*FOREGROUND, 3)
    radius = rng.uniform(8, 13)
    center = rng.uniform(radius - 2, SHAPES_PIXELS - radius + 2, 2)
    down, across = np.mgrid[:SHAPES_PIXELS, :SHAPES_PIXELS] + 0.5
    mask = inside((across - center[0]) / radius, (down - center[1]) / radius)
    image = np.where(mask[..., None], foreground, background)
    for left, top in rng.integers(0, SHAPES_PIXELS - 3, (DISTRACTORS, 2)):
        image[top : top + 3, left : left + 3] = rng.uniform(0, 255, 3)
    return np.clip(image + rng.normal(0, NOISE_STD, image.shape), 0, 255).astype(np.uint8)


SUPPORTED_SOURCES = (
    f"{CIFAR10_ARCHIVE.name}, a folder {BINARY_FOLDER}, an npz of JPEGs, "
    "a folder of IDX files, or a folder with one subfolder of images per class"
)


@dataclass(frozen=True)
class Cifar10Download:
    """CIFAR-10 that is on no disk yet: called, it is downloaded and read."""

    file: RemoteFile
    """The published archive."""
    folder: Path
    """Where it is downloaded to."""

    def __str__(self) -> str:
        size, hint = f"{self.file.size / 1e6:,.0f} MB", self.file.manual_hint
        return f"{CIFAR10_NAME} is not here: run downloads {size} into {self.folder}; without a network, {hint}"

    def require_network(self) -> None:
        """Raise where HF_HUB_OFFLINE forbids a download."""
        if is_offline():
            message = f"it has no {CIFAR10_NAME}, and HF_HUB_OFFLINE forbids the download; {self.file.manual_hint}"
            raise DataError([Problem(str(self.folder), message)])

    def __call__(self) -> ImageSplits:
        self.require_network()
        return read_binary_archive(download(self.file, self.folder))


def read_images(name: str, recipe_dir: Path, data_dir: str | None = None) -> ImageSplits:
    """Read the training and test images of a source, or those in data_dir, into which CIFAR-10 is downloaded."""
    with _usage_errors(data_dir or name):
        return find_images(name, recipe_dir, data_dir)()


@contextmanager
def _usage_errors(source: str) -> Iterator[None]:
    """Paths that cannot be opened, as an error of the user; `source` where the error names none."""
    try:
        yield
    except (PermissionError, IsADirectoryError) as error:
        raise UsageError(f"data: {error.filename or source} cannot be used ({error.strerror})") from None


def find_images(name: str, recipe_dir: Path, data_dir: str | None = None) -> Callable[[], ImageSplits]:
    """What reads the images; raises where there are none, without reading them."""
    path = local_path(data_dir or name, recipe_dir)
    if path is None and data_dir:
        hint = did_you_mean(data_dir, recipe_dir, []) or f"; create it as a folder to download {CIFAR10_NAME} into"
        raise UsageError(f"data.data_dir: there is no file or folder {data_dir!r}{hint}")
    if path is None and name == SHAPES_NAME:
        return make_shapes_dataset
    path = path or _find_cifar10(name, recipe_dir)
    if path is None:
        return Cifar10Download(CIFAR10_ARCHIVE, cache_dir())
    with _usage_errors(str(path)):
        return _find_in_folder(path, name if data_dir else "") if path.is_dir() else _find_file(path)


def _find_cifar10(name: str, recipe_dir: Path) -> Path | None:
    """The local files of `cifar10`, None if there are none; any other name is an error."""
    if name != CIFAR10_NAME:
        hint = did_you_mean(name, recipe_dir, [CIFAR10_NAME, SHAPES_NAME]) or f"; it wants {SUPPORTED_SOURCES}"
        raise UsageError(f"data: there is no file or folder {name!r}{hint}")
    local = (local_path(known, recipe_dir) for known in (BINARY_FOLDER, CIFAR10_ARCHIVE.name))
    cached = cache_dir() / CIFAR10_ARCHIVE.name
    return next(filter(None, local), None) or (cached if cached.exists() else None)


def _find_file(path: Path) -> Callable[[], ImageSplits]:
    reject_pickles(path)
    if path.suffix == ".npz":
        return partial(read_jpeg_npz, path)
    if path.name.endswith((".tar.gz", ".tgz")):
        return partial(read_binary_archive, path)
    if path.suffix == ".bin" or IDX_NAME.search(path.name):
        raise UsageError(f"data: {path} is one file of a set; name the folder it is in: {path.parent}")
    raise UsageError(f"data: {path} is of no form we know; it wants {SUPPORTED_SOURCES}")


def _find_in_folder(folder: Path, dataset_name: str = "") -> Callable[[], ImageSplits]:
    """What reads a folder, by its contents; a dataset one level below is found too, and CIFAR-10 is downloaded."""
    names = {path.name for path in folder.iterdir()} - {FSCK_DIR}
    if names & {*TRAIN_FILES, TEST_FILE}:
        reject_incomplete(folder)
        return partial(read_binary_folder, folder)
    if any(IDX_NAME.search(name) for name in names):
        return partial(read_idx_folder, folder)
    for known in (BINARY_FOLDER, CIFAR10_ARCHIVE.name):
        if known in names:
            return find_images(known, folder)
    for path in (folder, *(folder / name for name in names if name.startswith("cifar-10-"))):
        reject_pickles(path)
    files = sorted(name for name in names if name.endswith(".npz"))
    if len(files) == 1:
        return partial(read_jpeg_npz, folder / files[0])
    if find_split_dirs(folder) or any((folder / name).is_dir() for name in names):
        return partial(read_image_folder, folder)
    if dataset_name == CIFAR10_NAME:
        return Cifar10Download(replace(CIFAR10_ARCHIVE, manual_dir=f"into {folder}"), folder)
    contents = f"{len(names)} things, such as {', '.join(sorted(names)[:3])}" if names else "nothing"
    raise UsageError(f"data: the folder {folder} holds {contents}; it wants {SUPPORTED_SOURCES}")
