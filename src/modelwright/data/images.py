"""Read image classification datasets as arrays: CIFAR-10, npz of JPEGs, IDX files, folders, drawn shapes."""

from __future__ import annotations

import difflib
import gzip
import io
import json
import math
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data.download import RemoteFile, download, sha256_file
from modelwright.errors import DataError, Problem, UsageError
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import hash_file

NDArray = np.ndarray[Any, np.dtype[Any]]
DECODE_CACHE_VERSION = 1
"""Raised when decoding changes, so that an old cache is not taken for a new one."""


@dataclass(frozen=True)
class ImageDataset:
    """Images of one size with their classes, and where they came from."""

    images: NDArray
    """[count, height, width, channels] uint8."""
    labels: NDArray
    """[count] int64, a place in `classes` for each image."""
    classes: tuple[str, ...]
    """Names of the classes."""
    source: str
    """A sentence to stand beside every accuracy, such as "CIFAR-10, lossy JPEG npz"."""

    def __len__(self) -> int:
        return len(self.labels)

    def subsample(self, count: int) -> ImageDataset:
        """Fewer images, evenly spread over the set: sets sorted by class keep all their classes."""
        if count >= len(self):
            return self
        rows = np.arange(count) * len(self) // count
        return ImageDataset(self.images[rows], self.labels[rows], self.classes, self.source)

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
class ImageSplits:
    """What the model learns from and what is held out."""

    train: ImageDataset
    """Images that move the weights."""
    test: ImageDataset
    """Images that only measure."""

    def fingerprint(self) -> str:
        """Hash of every pixel, label and class name on both sides, in order."""
        digest = xxhash.xxh3_128(json.dumps(self.train.classes).encode())
        for dataset in (self.train, self.test):
            digest.update(f"{dataset.images.shape}".encode())
            digest.update(np.ascontiguousarray(dataset.images).data)
            digest.update(np.ascontiguousarray(dataset.labels).data)
        return digest.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """What the model sees, in numbers."""
        return {
            "source": self.train.source,
            "train_rows": len(self.train),
            "held_out_rows": len(self.test),
            "images_in_both_splits": len(_image_hashes(self.train) & _image_hashes(self.test)),
            "image": list(self.train.images.shape[1:]),
            "classes": list(self.train.classes),
            "fingerprint": self.fingerprint(),
        }


def validate_images(splits: ImageSplits, where: str) -> ImageSplits:
    """Hold a set that was just read against what training takes; every problem is told at once."""
    problems: list[Problem] = []
    for name, dataset in (("training", splits.train), ("test", splits.test)):
        if not len(dataset):
            problems.append(Problem(where, f"there is no {name} image in it"))
        elif int(dataset.labels.max()) >= len(splits.train.classes):
            problem = (
                f"a {name} label is {int(dataset.labels.max())}, but there are {len(splits.train.classes)} classes"
            )
            problems.append(Problem(where, f"{problem}; it wants labels from 0 to {len(splits.train.classes) - 1}"))
    image_shapes = [dataset.images.shape[1:] for dataset in (splits.train, splits.test)]
    if not problems and image_shapes[0] != image_shapes[1]:
        message = f"training images are {format_image_size(image_shapes[0])} and test images {format_image_size(image_shapes[1])}; it wants one size"
        problems.append(Problem(where, message))
    if problems:
        raise DataError(problems)
    return splits


def format_image_size(shape: tuple[int, ...]) -> str:
    """The size of an image for people: width × height × channels."""
    height, width, channels = shape
    return f"{width} × {height} × {channels}"


def load_or_decode(key: str, decode: Callable[[], ImageSplits]) -> ImageSplits:
    """The set of that key out of the cache, or made now and kept; a cache that cannot be trusted is made anew."""
    folder = cache_dir() / f"images-v{DECODE_CACHE_VERSION}-{key}"
    with suppress(OSError, ValueError, KeyError):
        return _read_cache(folder)
    splits = decode()
    with suppress(OSError):  # a full or read-only disk costs the next start some seconds, and nothing else
        _write_cache(splits, folder)
    return splits


def _read_cache(folder: Path) -> ImageSplits:
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    datasets = []
    for split in ("train", "test"):
        arrays = []
        for part in ("images", "labels"):
            with (folder / f"{split}_{part}.npy").open("rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            if xxhash.xxh3_128_hexdigest(array.data) != metadata["hashes"][f"{split}_{part}"]:
                raise ValueError(f"{folder} holds a flipped bit")
            arrays.append(array)
        datasets.append(ImageDataset(arrays[0], arrays[1], tuple(metadata["classes"]), metadata["source"]))
    return ImageSplits(*datasets)


def _write_cache(splits: ImageSplits, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        hashes = {}
        for name, dataset in (("train", splits.train), ("test", splits.test)):
            for part, array in (("images", dataset.images), ("labels", dataset.labels)):
                contiguous = np.ascontiguousarray(array)
                hashes[f"{name}_{part}"] = xxhash.xxh3_128_hexdigest(contiguous.data)
                with (partial / f"{name}_{part}.npy").open("wb") as file:
                    np.lib.format.write_array(file, contiguous, allow_pickle=False)
        metadata = {"classes": splits.train.classes, "source": splits.train.source, "hashes": hashes}
        (partial / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # what is there could not be read
        partial.rename(folder)  # without fsync: a cache cut short by a power failure is found by its hashes
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _image_hashes(dataset: ImageDataset) -> set[int]:
    """A hash of each image."""
    return {xxhash.xxh3_64_intdigest(image.data) for image in np.ascontiguousarray(dataset.images)}


CIFAR10_ARCHIVE = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",  # md5 c32a1d4ab5d03f1284b67883e8d87530
)
CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
BINARY_FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
"""Bytes of one CIFAR-10 record: the label, then the red, green and blue planes."""
MAX_CIFAR_RECORDS = 10_000
"""Records in one CIFAR-10 file."""
NPZ_ARRAYS = (
    *("jpeg_header", "classes"),
    *("train_scans", "train_lengths", "train_labels"),
    *("test_scans", "test_lengths", "test_labels"),
)
IDX_NAME = re.compile(r"(train|t10k|test)[-_](images|labels)[-.]idx\d-ubyte(\.gz)?$")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
HELD_OUT_EVERY = 10
"""One image in so many is held out of a folder that has no test side."""
DECODE_BATCH = 256
"""Images one thread decodes before it takes the next lot."""
MAX_PROBLEMS_SHOWN = 20
"""Problems named one by one; the rest are counted."""


def reject_pickles(path: Path) -> None:
    """Turn the python form of CIFAR-10 away: reading a pickle runs whatever code is in it."""
    inside = path.is_dir() and ((path / "batches.meta").exists() or (path / "data_batch_1").exists())
    if inside or path.name in ("cifar-10-batches-py", "cifar-10-python.tar.gz") or path.suffix in (".pkl", ".pickle"):
        message = "this is a pickle, which may run any code when it is read; it wants the binary form of CIFAR-10"
        raise DataError([Problem(str(path), f"{message}: {CIFAR10_ARCHIVE.name} from {CIFAR10_ARCHIVE.url}")])


def read_binary_folder(folder: Path) -> ImageSplits:
    """CIFAR-10 in its original binary form, unpacked."""
    missing = [name for name in (*TRAIN_FILES, TEST_FILE) if not (folder / name).is_file()]
    if missing:
        raise DataError([Problem(str(folder), f"there is no {', '.join(missing)}; it wants the whole binary form")])
    class_names_file = folder / "batches.meta.txt"
    classes = (
        tuple(class_names_file.read_text(encoding="utf-8").split()) if class_names_file.is_file() else CIFAR10_CLASSES
    )
    return _from_records({name: (folder / name).read_bytes() for name in (*TRAIN_FILES, TEST_FILE)}, classes, folder)


def read_binary_archive(path: Path, published: RemoteFile = CIFAR10_ARCHIVE) -> ImageSplits:
    """CIFAR-10 in its original binary form, packed as published; decoded once, then read from the cache."""

    def unpack() -> ImageSplits:
        if (digest := sha256_file(path)) != published.sha256:
            message = f"its sha256 is {digest}, and that of the published archive {published.sha256}"
            raise DataError([Problem(str(path), f"{message}; download it again, or unpack it and name the folder")])
        return _from_records(_read_archive_members(path), CIFAR10_CLASSES, path)

    return load_or_decode(hash_file(path), unpack)


def _read_archive_members(path: Path) -> dict[str, bytes]:
    """The six files of the archive, by name; other members are not looked at, and nothing is written."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = Path(member.name).name
                if (
                    name in (*TRAIN_FILES, TEST_FILE)
                    and member.isreg()
                    and member.size <= CIFAR_RECORD_BYTES * MAX_CIFAR_RECORDS
                ):
                    opened = archive.extractfile(member)
                    files[name] = opened.read() if opened else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError([Problem(str(path), f"this is no whole archive ({error}); download it again")]) from None
    if missing := [name for name in (*TRAIN_FILES, TEST_FILE) if name not in files]:
        raise DataError(
            [Problem(str(path), f"there is no {', '.join(missing)} in it; it wants {CIFAR10_ARCHIVE.name}")]
        )
    return files


def _from_records(files: dict[str, bytes], classes: tuple[str, ...], where: Path) -> ImageSplits:
    problems = [
        Problem(
            str(where / name), f"it holds {len(data):,} bytes; it wants records of {CIFAR_RECORD_BYTES:,} bytes each"
        )
        for name, data in files.items()
        if not data or len(data) % CIFAR_RECORD_BYTES
    ]
    if problems:
        raise DataError(problems)

    def read_split(*names: str) -> ImageDataset:
        records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, CIFAR_RECORD_BYTES)
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = records[:, 0].astype(np.int64)
        return ImageDataset(np.ascontiguousarray(images), labels, classes, "CIFAR-10, original binary form")

    return validate_images(ImageSplits(read_split(*TRAIN_FILES), read_split(TEST_FILE)), str(where))


def read_jpeg_npz(path: Path) -> ImageSplits:
    """JPEGs that share one header, as {train,test}_{scans,lengths,labels}; decoded once, then read from the cache."""

    def decode() -> ImageSplits:
        try:
            with zipfile.ZipFile(path) as archive:
                arrays = {name.removesuffix(".npy"): _read_npy(archive, name) for name in archive.namelist()}
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
            raise DataError([Problem(str(path), f"this is no whole npz of plain arrays ({error})")]) from None
        if missing := [name for name in NPZ_ARRAYS if name not in arrays]:
            array_names = ", ".join(sorted(arrays)) or "none"
            raise DataError(
                [Problem(str(path), f"there is no array {', '.join(missing)}; the arrays are {array_names}")]
            )
        return validate_images(
            ImageSplits(_decode_jpeg_split(arrays, "train", path), _decode_jpeg_split(arrays, "test", path)), str(path)
        )

    return load_or_decode(hash_file(path), decode)


def _read_npy(archive: zipfile.ZipFile, name: str) -> NDArray:
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _decode_jpeg_split(arrays: dict[str, NDArray], split: str, path: Path) -> ImageDataset:
    header, scans = arrays["jpeg_header"].tobytes(), arrays[f"{split}_scans"].tobytes()
    lengths, labels = arrays[f"{split}_lengths"].astype(np.int64), arrays[f"{split}_labels"].astype(np.int64)
    if lengths.sum() != len(scans) or len(lengths) != len(labels):
        counts = (
            f"{len(labels):,} labels, {len(lengths):,} lengths that make {lengths.sum():,} bytes, {len(scans):,} bytes"
        )
        raise DataError([Problem(str(path), f"the {split} side does not add up: {counts}")])
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    names = [f"{path.name} {split} image {number}" for number in range(len(labels))]
    images = _decode_images(names, lambda row: header + scans[starts[row] : ends[row]], formats=("JPEG",))
    classes = tuple(str(name) for name in arrays["classes"].tolist())
    dataset_name = "CIFAR-10" if classes == CIFAR10_CLASSES else path.name
    return ImageDataset(images, labels, classes, f"{dataset_name}, lossy JPEG npz")


def read_idx_folder(folder: Path) -> ImageSplits:
    """MNIST-like IDX files, packed with gzip or plain."""
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


def read_image_folder(folder: Path, size: int | None = None) -> ImageSplits:
    """Images in one folder per class, below train/ and test/ (or val/), or split by content where those are not there.

    They must be of one size, or are brought to `size` × `size`. Decoded once, then read from the cache.
    """
    split_dirs = find_split_dirs(folder)
    train, test = (
        (_list_images(folder / split_dirs[0]), _list_images(folder / split_dirs[1]))
        if split_dirs
        else (_list_images(folder), [])
    )
    classes = tuple(sorted({path.parent.name for path in (*train, *test)}))
    if not train or len(classes) < 2:
        summary = f"{len(train)} training images in {len(classes)} classes"
        raise UsageError(
            f"data: {folder} holds {summary}; it wants one subfolder of images per class, two at the least"
        )
    stats = [(path, path.stat()) for path in (*train, *test)]
    listing = [f"{path.relative_to(folder)}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats]
    key = xxhash.xxh3_128_hexdigest(f"{folder.name}:{size}:{listing}".encode())

    def decode() -> ImageSplits:
        if split_dirs:
            split_paths, source = (train, test), f"{folder.name}, folder of images"
        else:
            split_paths, source = (
                _split_by_content(train),
                f"{folder.name}, folder of images, one in {HELD_OUT_EVERY} held out",
            )
        datasets = [_decode_folder_split(paths, classes, source, size) for paths in split_paths]
        return validate_images(ImageSplits(*datasets), str(folder))

    return load_or_decode(key, decode)


def find_split_dirs(folder: Path) -> tuple[str, str] | None:
    """The names of the training and the test side in a folder, where it has both."""
    for test in ("test", "val", "valid", "validation"):
        if (folder / "train").is_dir() and (folder / test).is_dir():
            return "train", test
    return None


def _list_images(folder: Path) -> list[Path]:
    """Every image in the class folders, in order of name."""
    class_dirs = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [
        path
        for class_dir in class_dirs
        for path in sorted(class_dir.iterdir())
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]


def _split_by_content(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Split by a hash of the content, so that copies of one image stay on one side."""
    hashes = {path: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in paths}
    distinct = sorted(set(hashes.values()))
    chosen = set(distinct[: max(1, len(distinct) // HELD_OUT_EVERY)])
    return [p for p in paths if hashes[p] not in chosen], [p for p in paths if hashes[p] in chosen]


def _decode_folder_split(
    paths: Sequence[Path], classes: tuple[str, ...], source: str, size: int | None
) -> ImageDataset:
    images = _decode_images(
        [f"{path.parent.name}/{path.name}" for path in paths], lambda row: paths[row].read_bytes(), size
    )
    labels = np.array([classes.index(path.parent.name) for path in paths], dtype=np.int64)
    return ImageDataset(images, labels, classes, source)


def _decode_images(
    names: Sequence[str], data: Callable[[int], bytes], size: int | None = None, formats: tuple[str, ...] | None = None
) -> NDArray:
    """Decode images of one size into one array, on all cores; every image that cannot be read is told."""
    from PIL import Image, ImageOps

    def decode(rows: range) -> Iterator[NDArray | str]:
        for row in rows:
            try:
                with Image.open(io.BytesIO(data(row)), formats=formats) as image:
                    rgb_image = (ImageOps.exif_transpose(image) if formats is None else image).convert("RGB")
                    yield np.asarray(rgb_image.resize((size, size), Image.Resampling.BILINEAR) if size else rgb_image)
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
            problems.append(Problem(name, f"{message}; it wants one size, or image_size to bring all to"))
    if problems:
        more = len(problems) - MAX_PROBLEMS_SHOWN
        tail = [Problem(f"{more} more images", "have problems like these")] if more > 0 else []
        raise DataError([*problems[:MAX_PROBLEMS_SHOWN], *tail])
    images = [image for image in decoded if not isinstance(image, str)]
    return np.stack(images) if images else np.zeros((0, *shape), np.uint8)


SHAPES_NAME = "shapes"
SHAPES_TRAIN, SHAPES_TEST = 3_000, 500
"""Pictures on each side, as many of each shape."""
SHAPES_PIXELS = 32
BACKGROUND, FOREGROUND = (0, 80), (150, 255)
"""Ranges of the ground's and of the shape's colour, of 255."""
NOISE_STD = 15.0
"""Standard deviation of what is added to every pixel, of 255."""
DISTRACTORS = 2
"""Small squares that stand in the way in every picture."""
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
"""For each shape, whether a place belongs to it; it fills -1 to 1, and y grows downwards."""


def make_shapes_dataset(seed: int = 0) -> ImageSplits:
    """The set, always the same: 32 × 32 in colour."""
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
    """One shape somewhere, in some size and colour, with specks in the way and noise over all."""
    background, foreground = rng.uniform(*BACKGROUND, 3), rng.uniform(*FOREGROUND, 3)
    radius = rng.uniform(8, 13)
    center = rng.uniform(radius - 2, SHAPES_PIXELS - radius + 2, 2)
    down, across = np.mgrid[:SHAPES_PIXELS, :SHAPES_PIXELS] + 0.5
    mask = inside((across - center[0]) / radius, (down - center[1]) / radius)
    image = np.where(mask[..., None], foreground, background)
    for left, top in rng.integers(0, SHAPES_PIXELS - 3, (DISTRACTORS, 2)):
        image[top : top + 3, left : left + 3] = rng.uniform(0, 255, 3)
    return np.clip(image + rng.normal(0, NOISE_STD, image.shape), 0, 255).astype(np.uint8)


__all__ = ["NAME", "ImageSet", "ImageSplit", "read_images"]
CIFAR10_NAME = "cifar10"
"""The set that is downloaded when it is nowhere near."""
SUPPORTED_SOURCES = (
    f"{CIFAR10_ARCHIVE.name}, a folder {BINARY_FOLDER}, an npz of JPEGs, "
    "a folder of IDX files, or a folder with one subfolder of images per class"
)


def read_images(name: str, recipe_dir: Path, size: int | None = None) -> ImageSplits:
    """The training and the test side of a set; `size` brings the images of a folder to size × size."""
    if name == SHAPES_NAME and not any((folder / name).exists() for folder in (Path(), recipe_dir)):
        return make_shapes_dataset()
    path = _find_source(name, recipe_dir)
    try:
        return _read_folder(path, size) if path.is_dir() else _read_file(path)
    except (PermissionError, IsADirectoryError) as error:
        raise UsageError(f"data: {error.filename or path} cannot be read ({error.strerror})") from None


def _find_source(name: str, recipe_dir: Path) -> Path:
    """The file or folder that a name means; only `cifar10` is looked for further, and brought from its publisher."""
    for folder in (Path(), recipe_dir):
        if (folder / name).exists():
            return folder / name
    if name != CIFAR10_NAME:
        siblings = [path.name for path in (recipe_dir / name).parent.glob("*")]
        close = difflib.get_close_matches(Path(name).name, [*siblings, CIFAR10_NAME, SHAPES_NAME], n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else f"; it wants {SUPPORTED_SOURCES}"
        raise UsageError(f"data: there is no file or folder {name!r}{hint}")
    for folder in (Path(), recipe_dir):
        for known in (BINARY_FOLDER, CIFAR10_ARCHIVE.name):
            if (folder / known).exists():
                return folder / known
    return download(CIFAR10_ARCHIVE, cache_dir())


def _read_file(path: Path) -> ImageSplits:
    reject_pickles(path)
    if path.suffix == ".npz":
        return read_jpeg_npz(path)
    if path.name.endswith((".tar.gz", ".tgz")):
        return read_binary_archive(path)
    if path.suffix == ".bin" or IDX_NAME.search(path.name):
        raise UsageError(f"data: {path} is one file of a set; name the folder it is in: {path.parent}")
    raise UsageError(f"data: {path} is of no form we know; it wants {SUPPORTED_SOURCES}")


def _read_folder(folder: Path, size: int | None) -> ImageSplits:
    """A folder by what is in it; a set that lies alone one level below is found too."""
    names = {path.name for path in folder.iterdir()}
    if names & {*TRAIN_FILES, TEST_FILE}:
        return read_binary_folder(folder)
    if any(IDX_NAME.search(name) for name in names):
        return read_idx_folder(folder)
    for known in (BINARY_FOLDER, CIFAR10_ARCHIVE.name):
        if known in names:
            return read_images(known, folder, size)
    for path in (folder, *(folder / name for name in names if name.startswith("cifar-10-"))):
        reject_pickles(path)
    files = sorted(name for name in names if name.endswith(".npz"))
    if len(files) == 1:
        return read_jpeg_npz(folder / files[0])
    if find_split_dirs(folder) or any(path.is_dir() for path in folder.iterdir()):
        return read_image_folder(folder, size)
    contents = f"{len(names)} things, such as {', '.join(sorted(names)[:3])}" if names else "nothing"
    raise UsageError(f"data: the folder {folder} holds {contents}; it wants {SUPPORTED_SOURCES}")
