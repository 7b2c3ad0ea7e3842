"""Read an image classification set from wherever it is, through one door.

    read_images("cifar10", beside)             the original archive: beside the recipe, in the cache, or downloaded
    read_images("cifar10_jpeg.npz", beside)    JPEGs in one file
    read_images("photos", beside)              a folder: CIFAR-10 binary, IDX files, or one subfolder per class
    read_images("shapes", beside)              the embedded set, drawn when it is read

Which source it was is part of what comes back, to stand beside every accuracy.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from modelwright.data import shapes
from modelwright.data.fetch import fetch
from modelwright.data.image_set import ImageSet, ImageSplit
from modelwright.data.image_sources import (
    BINARY_FOLDER,
    CIFAR10,
    IDX_NAME,
    TEST_FILE,
    TRAIN_FILES,
    read_binary_archive,
    read_binary_folder,
    read_idx_folder,
    read_image_folder,
    read_jpeg_npz,
    refuse_pickles,
    sides_of,
)
from modelwright.errors import UsageError
from modelwright.runs.caches import cache_dir

__all__ = ["NAME", "ImageSet", "ImageSplit", "read_images"]

NAME = "cifar10"
"""The set that is downloaded when it is nowhere near."""
WANTED = (
    f"{CIFAR10.name}, a folder {BINARY_FOLDER}, an npz of JPEGs, "
    "a folder of IDX files, or a folder with one subfolder of images per class"
)


def read_images(name: str, beside: Path, size: int | None = None) -> ImageSplit:
    """The training and the test side of a set; `size` brings the images of a folder to size × size."""
    if name == shapes.NAME and not any((folder / name).exists() for folder in (Path(), beside)):
        return shapes.draw()
    path = _find(name, beside)
    try:
        return _read_folder(path, size) if path.is_dir() else _read_file(path)
    except (PermissionError, IsADirectoryError) as error:
        raise UsageError(f"data: {error.filename or path} cannot be read ({error.strerror})") from None


def _find(name: str, beside: Path) -> Path:
    """The file or folder that a name means; only `cifar10` is looked for further, and brought from its publisher."""
    for folder in (Path(), beside):
        if (folder / name).exists():
            return folder / name
    if name != NAME:
        around = [path.name for path in (beside / name).parent.glob("*")]
        close = difflib.get_close_matches(Path(name).name, [*around, NAME, shapes.NAME], n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else f"; it wants {WANTED}"
        raise UsageError(f"data: there is no file or folder {name!r}{hint}")
    for folder in (Path(), beside):
        for known in (BINARY_FOLDER, CIFAR10.name):
            if (folder / known).exists():
                return folder / known
    return fetch(CIFAR10, cache_dir())


def _read_file(path: Path) -> ImageSplit:
    refuse_pickles(path)
    if path.suffix == ".npz":
        return read_jpeg_npz(path)
    if path.name.endswith((".tar.gz", ".tgz")):
        return read_binary_archive(path)
    if path.suffix == ".bin" or IDX_NAME.search(path.name):
        raise UsageError(f"data: {path} is one file of a set; name the folder it is in: {path.parent}")
    raise UsageError(f"data: {path} is of no form we know; it wants {WANTED}")


def _read_folder(folder: Path, size: int | None) -> ImageSplit:
    """A folder by what is in it; a set that lies alone one level below is found too."""
    names = {path.name for path in folder.iterdir()}
    if names & {*TRAIN_FILES, TEST_FILE}:
        return read_binary_folder(folder)
    if any(IDX_NAME.search(name) for name in names):
        return read_idx_folder(folder)
    for known in (BINARY_FOLDER, CIFAR10.name):
        if known in names:
            return read_images(known, folder, size)
    for path in (folder, *(folder / name for name in names if name.startswith("cifar-10-"))):
        refuse_pickles(path)
    files = sorted(name for name in names if name.endswith(".npz"))
    if len(files) == 1:
        return read_jpeg_npz(folder / files[0])
    if sides_of(folder) or any(path.is_dir() for path in folder.iterdir()):
        return read_image_folder(folder, size)
    found = f"{len(names)} things, such as {', '.join(sorted(names)[:3])}" if names else "nothing"
    raise UsageError(f"data: the folder {folder} holds {found}; it wants {WANTED}")
