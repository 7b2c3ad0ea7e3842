"""Readers of the forms that image sets come in: CIFAR-10 binary, JPEG npz, IDX files, folders of images.

None of them can run code that came with the data: the pickled CIFAR-10 is refused, arrays are read without pickles,
and an archive is read member by member, never unpacked.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from modelwright.data.fetch import Published, sha256_of
from modelwright.data.image_set import Array, ImageSet, ImageSplit, cached, check
from modelwright.errors import DataError, Problem, UsageError
from modelwright.runs.folder import hash_file

CIFAR10 = Published(
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
RECORD = 1 + 3 * 32 * 32
"""Bytes of one CIFAR-10 record: the label, then the red, green and blue planes."""
MOST_RECORDS = 10_000
"""Records in one CIFAR-10 file."""
NPZ_ARRAYS = (
    *("jpeg_header", "classes"),
    *("train_scans", "train_lengths", "train_labels"),
    *("test_scans", "test_lengths", "test_labels"),
)
IDX_NAME = re.compile(r"(train|t10k|test)[-_](images|labels)[-.]idx\d-ubyte(\.gz)?$")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
HELD_OUT_PARTS = 10
"""One image in so many is held out of a folder that has no test side."""
DECODED_AT_ONCE = 256
"""Images one thread decodes before it takes the next lot."""
MOST_SHOWN = 20
"""Problems named one by one; the rest are counted."""


def refuse_pickles(path: Path) -> None:
    """Turn the python form of CIFAR-10 away: reading a pickle runs whatever code is in it."""
    inside = path.is_dir() and ((path / "batches.meta").exists() or (path / "data_batch_1").exists())
    if inside or path.name in ("cifar-10-batches-py", "cifar-10-python.tar.gz") or path.suffix in (".pkl", ".pickle"):
        letter = "this is a pickle, which may run any code when it is read; it wants the binary form of CIFAR-10"
        raise DataError([Problem(str(path), f"{letter}: {CIFAR10.name} from {CIFAR10.address}")])


def read_binary_folder(folder: Path) -> ImageSplit:
    """CIFAR-10 in its original binary form, unpacked."""
    missing = [name for name in (*TRAIN_FILES, TEST_FILE) if not (folder / name).is_file()]
    if missing:
        raise DataError([Problem(str(folder), f"there is no {', '.join(missing)}; it wants the whole binary form")])
    named = folder / "batches.meta.txt"
    classes = tuple(named.read_text(encoding="utf-8").split()) if named.is_file() else CIFAR10_CLASSES
    return _from_records({name: (folder / name).read_bytes() for name in (*TRAIN_FILES, TEST_FILE)}, classes, folder)


def read_binary_archive(path: Path, published: Published = CIFAR10) -> ImageSplit:
    """CIFAR-10 in its original binary form, packed as published; decoded once, then read from the cache."""

    def unpack() -> ImageSplit:
        if (found := sha256_of(path)) != published.sha256:
            letter = f"its sha256 is {found}, and that of the published archive {published.sha256}"
            raise DataError([Problem(str(path), f"{letter}; bring it again, or unpack it and name the folder")])
        return _from_records(_members(path), CIFAR10_CLASSES, path)

    return cached(hash_file(path), unpack)


def _members(path: Path) -> dict[str, bytes]:
    """The six files of the archive, by name; other members are not looked at, and nothing is written."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = Path(member.name).name
                if name in (*TRAIN_FILES, TEST_FILE) and member.isreg() and member.size <= RECORD * MOST_RECORDS:
                    opened = archive.extractfile(member)
                    files[name] = opened.read() if opened else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError([Problem(str(path), f"this is no whole archive ({error}); bring it again")]) from None
    if missing := [name for name in (*TRAIN_FILES, TEST_FILE) if name not in files]:
        raise DataError([Problem(str(path), f"there is no {', '.join(missing)} in it; it wants {CIFAR10.name}")])
    return files


def _from_records(files: dict[str, bytes], classes: tuple[str, ...], where: Path) -> ImageSplit:
    wrong = [
        Problem(str(where / name), f"it holds {len(data):,} bytes; it wants records of {RECORD:,} bytes each")
        for name, data in files.items()
        if not data or len(data) % RECORD
    ]
    if wrong:
        raise DataError(wrong)

    def side(*names: str) -> ImageSet:
        records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, RECORD)
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = records[:, 0].astype(np.int64)
        return ImageSet(np.ascontiguousarray(images), labels, classes, "CIFAR-10, original binary form")

    return check(ImageSplit(side(*TRAIN_FILES), side(TEST_FILE)), str(where))


def read_jpeg_npz(path: Path) -> ImageSplit:
    """JPEGs that share one header, as {train,test}_{scans,lengths,labels}; decoded once, then read from the cache."""

    def decode() -> ImageSplit:
        try:
            with zipfile.ZipFile(path) as stored:
                arrays = {name.removesuffix(".npy"): _array(stored, name) for name in stored.namelist()}
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
            raise DataError([Problem(str(path), f"this is no whole npz of plain arrays ({error})")]) from None
        if missing := [name for name in NPZ_ARRAYS if name not in arrays]:
            found = ", ".join(sorted(arrays)) or "none"
            raise DataError([Problem(str(path), f"there is no array {', '.join(missing)}; the arrays are {found}")])
        return check(ImageSplit(_jpeg_side(arrays, "train", path), _jpeg_side(arrays, "test", path)), str(path))

    return cached(hash_file(path), decode)


def _array(stored: zipfile.ZipFile, name: str) -> Array:
    with stored.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _jpeg_side(arrays: dict[str, Array], side: str, path: Path) -> ImageSet:
    header, scans = arrays["jpeg_header"].tobytes(), arrays[f"{side}_scans"].tobytes()
    lengths, labels = arrays[f"{side}_lengths"].astype(np.int64), arrays[f"{side}_labels"].astype(np.int64)
    if lengths.sum() != len(scans) or len(lengths) != len(labels):
        found = (
            f"{len(labels):,} labels, {len(lengths):,} lengths that make {lengths.sum():,} bytes, {len(scans):,} bytes"
        )
        raise DataError([Problem(str(path), f"the {side} side does not add up: {found}")])
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    names = [f"{path.name} {side} image {number}" for number in range(len(labels))]
    images = _decode(names, lambda row: header + scans[starts[row] : ends[row]], formats=("JPEG",))
    classes = tuple(str(name) for name in arrays["classes"].tolist())
    called = "CIFAR-10" if classes == CIFAR10_CLASSES else path.name
    return ImageSet(images, labels, classes, f"{called}, lossy JPEG npz")


def read_idx_folder(folder: Path) -> ImageSplit:
    """MNIST-like IDX files, packed with gzip or plain."""
    parts: dict[tuple[str, str], Array] = {}
    for path in sorted(folder.iterdir()):
        if found := IDX_NAME.search(path.name):
            parts["train" if found[1] == "train" else "test", found[2]] = _idx(path)
    wanted = [(side, part) for side in ("train", "test") for part in ("images", "labels")]
    if missing := [f"{side} {part}" for side, part in wanted if (side, part) not in parts]:
        raise DataError([Problem(str(folder), f"there is no IDX file with the {' and the '.join(missing)}")])
    for side in ("train", "test"):
        images, labels = parts[side, "images"], parts[side, "labels"]
        if images.ndim not in (3, 4) or labels.ndim != 1 or len(images) != len(labels):
            letter = f"the {side} images are {list(images.shape)} and the labels {list(labels.shape)}"
            raise DataError([Problem(str(folder), f"{letter}; it wants [count, height, width] and [count]")])
    highest = max(parts[side, "labels"].max(initial=0) for side in ("train", "test"))
    classes, source = tuple(str(number) for number in range(highest + 1)), f"{folder.name}, IDX files"
    train, test = (
        ImageSet(images if images.ndim == 4 else images[..., None], labels.astype(np.int64), classes, source)
        for images, labels in ((parts[side, "images"], parts[side, "labels"]) for side in ("train", "test"))
    )
    return check(ImageSplit(train, test), str(folder))


def _idx(path: Path) -> Array:
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
        found = f"its head says {' × '.join(map(str, shape))}, and {len(data):,} bytes follow"
        raise DataError([Problem(str(path), f"{found}; it wants {math.prod(shape):,}")])
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape)


def read_image_folder(folder: Path, size: int | None = None) -> ImageSplit:
    """Images in one folder per class, below train/ and test/ (or val/), or split by content where those are not there.

    They must be of one size, or are brought to `size` × `size`. Decoded once, then read from the cache.
    """
    sides = sides_of(folder)
    train, test = (_listed(folder / sides[0]), _listed(folder / sides[1])) if sides else (_listed(folder), [])
    classes = tuple(sorted({path.parent.name for path in (*train, *test)}))
    if not train or len(classes) < 2:
        found = f"{len(train)} training images in {len(classes)} classes"
        raise UsageError(f"data: {folder} holds {found}; it wants one subfolder of images per class, two at the least")
    stats = [(path, path.stat()) for path in (*train, *test)]
    listing = [f"{path.relative_to(folder)}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats]
    key = xxhash.xxh3_128_hexdigest(f"{folder.name}:{size}:{listing}".encode())

    def decode() -> ImageSplit:
        if sides:
            told, source = (train, test), f"{folder.name}, folder of images"
        else:
            told, source = _hold_out(train), f"{folder.name}, folder of images, one in {HELD_OUT_PARTS} held out"
        sets = [_folder_side(paths, classes, source, size) for paths in told]
        return check(ImageSplit(*sets), str(folder))

    return cached(key, decode)


def sides_of(folder: Path) -> tuple[str, str] | None:
    """The names of the training and the test side in a folder, where it has both."""
    for test in ("test", "val", "valid", "validation"):
        if (folder / "train").is_dir() and (folder / test).is_dir():
            return "train", test
    return None


def _listed(folder: Path) -> list[Path]:
    """Every image in the class folders, in order of name."""
    kinds = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [path for kind in kinds for path in sorted(kind.iterdir()) if path.suffix.lower() in SUFFIXES]


def _hold_out(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Split by a hash of the content, so that copies of one image stay on one side."""
    hashes = {path: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in paths}
    distinct = sorted(set(hashes.values()))
    chosen = set(distinct[: max(1, len(distinct) // HELD_OUT_PARTS)])
    return [p for p in paths if hashes[p] not in chosen], [p for p in paths if hashes[p] in chosen]


def _folder_side(paths: Sequence[Path], classes: tuple[str, ...], source: str, size: int | None) -> ImageSet:
    images = _decode([f"{path.parent.name}/{path.name}" for path in paths], lambda row: paths[row].read_bytes(), size)
    labels = np.array([classes.index(path.parent.name) for path in paths], dtype=np.int64)
    return ImageSet(images, labels, classes, source)


def _decode(
    names: Sequence[str], data: Callable[[int], bytes], size: int | None = None, formats: tuple[str, ...] | None = None
) -> Array:
    """Decode images of one size into one array, on all cores; every image that cannot be read is told."""
    from PIL import Image, ImageOps

    def decode(rows: range) -> Iterator[Array | str]:
        for row in rows:
            try:
                with Image.open(io.BytesIO(data(row)), formats=formats) as image:
                    upright = (ImageOps.exif_transpose(image) if formats is None else image).convert("RGB")
                    yield np.asarray(upright.resize((size, size), Image.Resampling.BILINEAR) if size else upright)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                yield f"this is no whole image ({error})"

    lots = [range(start, min(start + DECODED_AT_ONCE, len(names))) for start in range(0, len(names), DECODED_AT_ONCE)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = [image for lot in threads.map(lambda lot: list(decode(lot)), lots) for image in lot]
    shape = next((image.shape for image in found if not isinstance(image, str)), (0, 0, 3))
    problems = [Problem(name, image) for name, image in zip(names, found, strict=True) if isinstance(image, str)]
    for name, image in zip(names, found, strict=True):
        if not isinstance(image, str) and image.shape != shape:
            letter = f"it is {image.shape[1]} × {image.shape[0]} and the first image {shape[1]} × {shape[0]}"
            problems.append(Problem(name, f"{letter}; it wants one size, or image_size to bring all to"))
    if problems:
        more = len(problems) - MOST_SHOWN
        tail = [Problem(f"{more} more images", "have problems like these")] if more > 0 else []
        raise DataError([*problems[:MOST_SHOWN], *tail])
    images = [image for image in found if not isinstance(image, str)]
    return np.stack(images) if images else np.zeros((0, *shape), np.uint8)
