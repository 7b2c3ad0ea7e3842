"""Image sets are read from every form they come in, decoded once, and nothing in them can act."""

from __future__ import annotations

import gzip
import io
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelwright.cli.main import main
from modelwright.data import array_cache, images
from modelwright.data.download import RemoteFile, download, sha256_file
from modelwright.data.images import (
    CIFAR10_ARCHIVE,
    CIFAR10_CLASSES,
    TEST_FILE,
    TRAIN_FILES,
    ImageDataset,
    ImageSplits,
    read_binary_archive,
    read_images,
)
from modelwright.errors import DataError, RecipeError, UsageError
from modelwright.recipe.load import load

DICE = np.random.default_rng(7)
PIXELS = DICE.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(24) % 10


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(folder))
    return folder


def binary_files(labels: Any = LABELS) -> dict[str, bytes]:
    """Four records in each of the six files of CIFAR-10's binary form."""
    planes = PIXELS.transpose(0, 3, 1, 2).reshape(24, -1)
    records = np.concatenate([np.asarray(labels, np.uint8)[:, None], planes], axis=1)
    return {name: records[4 * n : 4 * n + 4].tobytes() for n, name in enumerate((*TRAIN_FILES, TEST_FILE))}


def binary_folder(folder: Path, labels: Any = LABELS) -> Path:
    folder.mkdir(parents=True)
    for name, data in binary_files(labels).items():
        (folder / name).write_bytes(data)
    return folder


def binary_archive(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in {**binary_files(), "readme.html": b"hello"}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def jpeg(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def jpeg_npz(path: Path, **changes: Any) -> Path:
    """Twenty training and four test images as JPEGs, the header that all share stored once."""
    files = [jpeg(image) for image in PIXELS]
    head = files[0].index(b"\xff\xda")
    assert all(file[:head] == files[0][:head] for file in files)
    scans = [np.frombuffer(file[head:], np.uint8) for file in files]
    arrays: dict[str, Any] = {"jpeg_header": np.frombuffer(files[0][:head], np.uint8), "classes": CIFAR10_CLASSES}
    for name, rows in (("train", slice(0, 20)), ("test", slice(20, 24))):
        arrays[f"{name}_scans"] = np.concatenate(scans[rows])
        arrays[f"{name}_lengths"] = np.array([len(scan) for scan in scans[rows]], np.uint16)
        arrays[f"{name}_labels"] = LABELS[rows].astype(np.uint8)
    np.savez(path, **{name: array for name, array in {**arrays, **changes}.items() if array is not None})
    return path


def idx(array: Any) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def idx_folder(folder: Path, packed: bool) -> Path:
    folder.mkdir()
    for name, array in {
        "train-images-idx3-ubyte": PIXELS[:20, :28, :28, 0],
        "train-labels-idx1-ubyte": LABELS[:20],
        "t10k-images-idx3-ubyte": PIXELS[20:, :28, :28, 0],
        "t10k-labels-idx1-ubyte": LABELS[20:],
    }.items():
        data = idx(array)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    return folder


def class_folders(folder: Path, count: int = 10, size: int = 32) -> Path:
    for number in range(count):
        path = folder / ("cat", "dog")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[number % 24, :size, :size]).save(path)
    return folder


def assert_is_the_set(split: ImageSplits) -> None:
    assert np.array_equal(np.concatenate([split.train.images, split.test.images]), PIXELS)
    assert np.array_equal(np.concatenate([split.train.labels, split.test.labels]), LABELS)
    assert split.train.classes == split.test.classes == CIFAR10_CLASSES
    assert (len(split.train), len(split.test)) == (20, 4)
    assert (split.train.images.dtype, split.train.labels.dtype) == (np.uint8, np.int64)


def test_the_binary_form_of_cifar10_is_read_from_its_folder(tmp_path: Path) -> None:
    split = read_images("cifar-10-batches-bin", binary_folder(tmp_path / "cifar-10-batches-bin").parent)
    assert_is_the_set(split)
    assert split.test.source == "CIFAR-10, original binary form"


def test_it_is_found_by_the_name_of_the_set_and_from_the_folder_around_it(tmp_path: Path) -> None:
    binary_folder(tmp_path / "data" / "cifar-10-batches-bin")
    assert_is_the_set(read_images("cifar10", tmp_path / "data"))
    assert_is_the_set(read_images("data", tmp_path))


def test_its_class_names_are_taken_from_where_they_are_written(tmp_path: Path) -> None:
    folder = binary_folder(tmp_path / "set")
    (folder / "batches.meta.txt").write_text("\n".join(f"kind{n}" for n in range(10)) + "\n\n", encoding="utf-8")
    assert read_images("set", tmp_path).train.classes[:2] == ("kind0", "kind1")


def test_the_archive_is_read_when_its_checksum_is_right_and_from_the_cache_afterwards(tmp_path: Path) -> None:
    path = binary_archive(tmp_path / CIFAR10_ARCHIVE.name)
    published = replace(CIFAR10_ARCHIVE, checksum=sha256_file(path))
    assert_is_the_set(read_binary_archive(path, published))
    assert_is_the_set(
        read_binary_archive(path, CIFAR10_ARCHIVE)
    )  # out of the cache, which only a checked archive enters
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", CIFAR10_ARCHIVE.name], "nothing is unpacked"


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    binary_archive(tmp_path / CIFAR10_ARCHIVE.name)
    with pytest.raises(
        DataError, match=r"sha256 is [0-9a-f]{64}, and that of the published archive c4a38c50.*unpack it"
    ):
        read_images("cifar10", tmp_path)


def test_half_an_archive_is_reported(tmp_path: Path) -> None:
    path = binary_archive(tmp_path / CIFAR10_ARCHIVE.name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="this is no whole archive"):
        read_binary_archive(path, replace(CIFAR10_ARCHIVE, checksum=sha256_file(path)))


def test_an_archive_of_something_else_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "other.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("readme.txt"))
    with pytest.raises(DataError, match=r"there is no data_batch_1\.bin"):
        read_binary_archive(path, replace(CIFAR10_ARCHIVE, checksum=sha256_file(path)))


@pytest.mark.parametrize(
    "name", ["cifar-10-python.tar.gz", "cifar-10-batches-py", "set.pkl", "python-folder", "around"]
)
def test_pickles_are_refused_and_the_binary_form_is_named(name: str, tmp_path: Path) -> None:
    if name == "around":
        (tmp_path / name / "cifar-10-batches-py").mkdir(parents=True)
    elif "." in name:
        (tmp_path / name).write_bytes(b"\x80\x04N.")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data_batch_1").write_bytes(b"\x80\x04N.")
    with pytest.raises(
        DataError, match=r"this is a pickle.*cifar-10-binary\.tar\.gz from https://www\.cs\.toronto\.edu"
    ):
        read_images(name, tmp_path)


def test_a_short_file_a_missing_file_and_a_wrong_label_are_reported(tmp_path: Path) -> None:
    folder = binary_folder(tmp_path / "set")
    (folder / TEST_FILE).write_bytes(b"\0" * 3000)
    with pytest.raises(DataError, match=r"test_batch\.bin: it holds 3,000 bytes; it wants records of 3,073 bytes"):
        read_images("set", tmp_path)
    (folder / TEST_FILE).unlink()
    with pytest.raises(DataError, match=r"there is no test_batch\.bin"):
        read_images("set", tmp_path)
    binary_folder(tmp_path / "wrong", labels=[10] * 24)
    with pytest.raises(DataError, match="a training label is 10, but there are 10 classes") as output:
        read_images("wrong", tmp_path)
    assert len(output.value.problems) == 2, "both sides are reported at once"


def test_the_jpeg_npz_gives_the_decoded_images(tmp_path: Path) -> None:
    jpeg_npz(tmp_path / "set.npz")
    split = read_images("set.npz", tmp_path)
    expected = np.stack([np.asarray(Image.open(io.BytesIO(jpeg(image)))) for image in PIXELS])
    assert np.array_equal(np.concatenate([split.train.images, split.test.images]), expected)
    assert np.array_equal(np.concatenate([split.train.labels, split.test.labels]), LABELS)
    assert split.train.source == split.test.source == "CIFAR-10, lossy JPEG npz"
    assert split.train.classes == CIFAR10_CLASSES


def test_an_npz_alone_in_a_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    jpeg_npz(tmp_path / "cifar10" / "compact.npz")
    assert len(read_images("cifar10", tmp_path).train) == 20


def test_a_second_start_decodes_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg_npz(tmp_path / "set.npz")
    first = read_images("set.npz", tmp_path)
    monkeypatch.setattr(images, "_decode_images", None)
    second = read_images("set.npz", tmp_path)
    assert second.fingerprint() == first.fingerprint()
    assert second.train.source == first.train.source
    left = sorted(path.name[:8] for path in cache.iterdir() if path.suffix != ".lock")
    assert left == ["images-v"], "no half-made cache is left"


@pytest.mark.parametrize("harm", ["flip", "cut", "no facts"])
def test_a_damaged_cache_is_decoded_again(
    harm: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jpeg_npz(tmp_path / "set.npz")
    first = read_images("set.npz", tmp_path).fingerprint()
    (folder,) = cache.glob("images-*")
    stored = folder / "train_images.npy"
    data = bytearray(stored.read_bytes())
    if harm == "flip":
        data[-100] ^= 1
        stored.write_bytes(data)
    elif harm == "cut":
        stored.write_bytes(data[:-100])
    else:
        (folder / "metadata.json").unlink()
    assert read_images("set.npz", tmp_path).fingerprint() == first
    monkeypatch.setattr(images, "_decode_images", None)
    assert read_images("set.npz", tmp_path).fingerprint() == first


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg_npz(tmp_path / "set.npz")
    monkeypatch.setattr(array_cache, "cache_dir", lambda: Path("/proc/nowhere"))
    assert len(read_images("set.npz", tmp_path).train) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None, "test_labels": None}, "there is no array classes, test_labels; the arrays are jpeg_header"),
        ({"train_labels": LABELS[:19]}, "the train split does not add up: 19 labels, 20 lengths"),
        ({"train_scans": np.zeros(10, np.uint8)}, "the train split does not add up"),
        ({"test_labels": np.array([0, 1, 2, 10])}, "a test label is 10, but there are 10 classes"),
        ({"classes": np.array([{"a": 1}], object)}, "this is no whole npz of plain arrays"),
    ],
)
def test_an_npz_that_does_not_add_up_is_reported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    jpeg_npz(tmp_path / "set.npz", **changes)
    with pytest.raises(DataError, match=message):
        read_images("set.npz", tmp_path)


def test_scans_that_are_no_jpeg_are_reported_by_number_and_the_rest_counted(tmp_path: Path) -> None:
    jpeg_npz(tmp_path / "set.npz", jpeg_header=np.zeros(10, np.uint8))
    with pytest.raises(DataError, match=r"set\.npz train image 0: this is no whole image") as output:
        read_images("set.npz", tmp_path)
    assert len(output.value.problems) == 1 and "(20 images like it" in str(output.value)


def test_a_file_that_is_no_zip_is_reported(tmp_path: Path) -> None:
    (tmp_path / "set.npz").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"set\.npz: this is no whole npz"):
        read_images("set.npz", tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_packed_or_plain(packed: bool, tmp_path: Path) -> None:
    split = read_images("digits", idx_folder(tmp_path / "digits", packed).parent)
    assert split.train.images.shape == (20, 28, 28, 1)
    assert np.array_equal(split.test.images[..., 0], PIXELS[20:, :28, :28, 0])
    assert np.array_equal(split.train.labels, LABELS[:20])
    assert split.train.classes == tuple("0123456789")
    assert split.train.source == "digits, IDX files"


def test_idx_files_that_are_cut_or_missing_are_reported(tmp_path: Path) -> None:
    folder = idx_folder(tmp_path / "digits", packed=True)
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(LABELS[20:])[:-1]))
    with pytest.raises(DataError, match=r"labels.*: its head says 4, and 3 bytes follow; it wants 4"):
        read_images("digits", tmp_path)
    labels.write_bytes(gzip.compress(idx(LABELS[20:]))[:-9])
    with pytest.raises(DataError, match="this is no whole gzip file"):
        read_images("digits", tmp_path)
    labels.write_bytes(gzip.compress(b"\0\0\x0d\x01\0\0\0\x04"))
    with pytest.raises(DataError, match="this is no IDX file of bytes"):
        read_images("digits", tmp_path)
    labels.write_bytes(gzip.compress(idx(LABELS[19:])))
    with pytest.raises(DataError, match=r"the test images are \[4, 28, 28\] and the labels \[5\]"):
        read_images("digits", tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match="there is no IDX file with the test labels"):
        read_images("digits", tmp_path)


@pytest.mark.parametrize("name", ["test", "val"])
def test_a_folder_with_both_splits_keeps_them(name: str, tmp_path: Path) -> None:
    class_folders(tmp_path / "pets" / "train", 6)
    class_folders(tmp_path / "pets" / name, 4)
    (tmp_path / "pets" / "train" / "cat" / "notes.txt").write_text("no image", encoding="utf-8")
    split = read_images("pets", tmp_path)
    assert split.train.classes == ("cat", "dog")
    assert np.array_equal(split.train.images, PIXELS[[0, 2, 4, 1, 3, 5]])
    assert split.test.labels.tolist() == [0, 0, 1, 1]
    assert split.train.source == "pets, folder of images"


def test_a_folder_without_splits_is_split_by_content_so_that_copies_stay_together(tmp_path: Path) -> None:
    class_folders(tmp_path / "pets", 48)  # every image twice, under two names
    split = read_images("pets", tmp_path)
    assert (len(split.train), len(split.test)) == (44, 4)
    assert split.manifest()["images_in_both_splits"] == 0
    assert split.train.source == "pets, folder of images, one in 10 held out"
    again = read_images("pets", tmp_path)
    assert again.fingerprint() == split.fingerprint()


def test_an_image_that_changed_is_decoded_again(tmp_path: Path) -> None:
    class_folders(tmp_path / "pets")
    before = read_images("pets", tmp_path).fingerprint()
    Image.fromarray(255 - PIXELS[0]).save(tmp_path / "pets" / "cat" / "00.png")
    assert read_images("pets", tmp_path).fingerprint() != before


def test_images_of_many_sizes_are_an_error(tmp_path: Path) -> None:
    class_folders(tmp_path / "pets")
    Image.fromarray(PIXELS[0, :20, :24]).convert("L").save(tmp_path / "pets" / "cat" / "00.png")
    with pytest.raises(DataError, match=r"it is \d+ × \d+ and the first image .*; it wants one size"):
        read_images("pets", tmp_path)


def test_broken_images_are_reported_all_at_once(tmp_path: Path) -> None:
    class_folders(tmp_path / "pets", 60)
    for path in (tmp_path / "pets" / "dog").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"dog/01\.png: this is no whole image") as output:
        read_images("pets", tmp_path)
    assert len(output.value.problems) == 1 and "images like it, such as" in str(output.value)


def test_every_miss_is_an_error_that_says_what_would_work(tmp_path: Path) -> None:
    (tmp_path / "cifar10_jpeg.npz").touch()
    with pytest.raises(UsageError, match=r"no file or folder 'cifar10_jpg\.npz'; did you mean cifar10_jpeg\.npz"):
        read_images("cifar10_jpg.npz", tmp_path)
    with pytest.raises(UsageError, match="no file or folder 'xyz'; it wants cifar-10-binary"):
        read_images("xyz", tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"notes\.txt is of no form we know; it wants"):
        read_images("notes.txt", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds nothing; it wants"):
        read_images("empty", tmp_path)
    (tmp_path / "one" / "cat").mkdir(parents=True)
    with pytest.raises(UsageError, match="one holds 0 training images in 0 classes; it wants one subfolder"):
        read_images("one", tmp_path)
    binary_folder(tmp_path / "set")
    with pytest.raises(UsageError, match="is one file of a set; name the folder it is in"):
        read_images("set/data_batch_1.bin", tmp_path)


def test_cifar10_that_is_nowhere_near_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = binary_archive(tmp_path / "published.tar.gz")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(images, "download", lambda file, folder: path if file == CIFAR10_ARCHIVE else None)
    monkeypatch.setattr(images, "read_binary_archive", lambda result: read_binary_archive(
        result, replace(CIFAR10_ARCHIVE, checksum=sha256_file(path))))  # fmt: skip
    assert_is_the_set(read_images("cifar10", tmp_path / "empty"))


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server in place of the published archive; returns the requested paths."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    requests: list[str] = []
    (tmp_path / "server").mkdir()
    path = binary_archive(tmp_path / "server" / CIFAR10_ARCHIVE.name)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            requests.append(self.path)
            super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(path.parent)))
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/{path.name}"
    archive = RemoteFile(url, path.stat().st_size, sha256_file(path))
    monkeypatch.setattr(images, "CIFAR10_ARCHIVE", archive)
    monkeypatch.setattr(images, "read_binary_archive", lambda result: read_binary_archive(result, archive))
    yield requests
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("content", [None, "lost+found", "notes.txt"])
def test_a_data_dir_without_images_is_filled_once_and_then_read(
    published: list[str], tmp_path: Path, content: str | None
) -> None:
    folder = tmp_path / "volume"
    (folder / "lost+found").mkdir(parents=True) if content == "lost+found" else folder.mkdir()
    if content == "notes.txt":
        (folder / content).write_text("of mine")
    for _ in range(2):
        assert_is_the_set(read_images("cifar10", tmp_path, str(folder)))
    assert published == ["/cifar-10-binary.tar.gz"] and (folder / "cifar-10-binary.tar.gz").is_file()


def test_a_data_dir_is_read_whatever_form_its_images_have(tmp_path: Path) -> None:
    binary_folder(tmp_path / "volume" / "cifar-10-batches-bin")
    assert_is_the_set(read_images("cifar10", tmp_path, "volume"))
    jpeg_npz(tmp_path / "compact.npz")
    assert len(read_images("cifar10", tmp_path, "compact.npz").train) == 20


def test_only_cifar10_is_downloaded_into_a_data_dir(published: list[str], tmp_path: Path) -> None:
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    for name, data_dir in (("volume", None), ("shapes", "volume")):
        with pytest.raises(UsageError, match=r"the folder .*volume holds nothing; it wants cifar-10-binary"):
            read_images(name, tmp_path, data_dir)
    with pytest.raises(UsageError, match=r"no file or folder '/none'; create it as a folder to download cifar10 into"):
        read_images("cifar10", tmp_path, "/none")
    assert published == []


def test_a_data_dir_is_for_images_only() -> None:
    with pytest.raises(RecipeError, match="has data_dir, which is for images; name the folder itself as dataset_name"):
        load("quickstart", ["data.data_dir=/shared/data"], {})


def test_without_a_network_the_message_says_what_to_put_into_the_data_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]  # closed again: nothing answers there
    archive = replace(CIFAR10_ARCHIVE, url=f"http://127.0.0.1:{port}/cifar-10-binary.tar.gz")
    monkeypatch.setattr(images, "CIFAR10_ARCHIVE", archive)
    monkeypatch.setattr(images, "download", partial(download, retry_delays=()))
    with pytest.raises(DataError, match=rf"or put cifar-10-binary\.tar\.gz into {tmp_path}$"):
        read_images("cifar10", tmp_path, str(tmp_path))


def test_check_says_what_a_run_downloads_and_refuses_what_a_run_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main(["check", "resnet18-cifar10", "--set", f"data.data_dir={folder}"])
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out + printed.err

    folder = tmp_path / "volume"
    assert "data.data_dir: there is no file or folder" in check()[1]
    (folder / "lost+found").mkdir(parents=True)
    code, refused = check()
    assert code and f"HF_HUB_OFFLINE forbids the download; put cifar-10-binary.tar.gz into {folder}" in refused
    with pytest.raises(DataError, match="HF_HUB_OFFLINE forbids the download"):
        read_images("cifar10", tmp_path, str(folder))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    code, output = check()
    assert code == 0 and f"run downloads 170 MB into {folder}; without a network, put cifar-10-binary" in output
    (folder / "cifar-10-batches-py").mkdir()
    assert "this is a pickle, which may run any code" in check()[1]
    (folder / "cifar-10-batches-py").rmdir()
    binary_folder(folder / "cifar-10-batches-bin")
    code, output = check()
    assert code == 0 and "downloads" not in output


def test_fewer_images_are_taken_evenly_and_counted_exactly() -> None:
    full = ImageDataset(PIXELS, np.repeat([0, 1, 2], 8), ("a", "b", "c"), "a test")
    assert full.subsample(6).labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert full.subsample(100) is full
    mean, std = full.mean_and_std()
    assert mean == pytest.approx(tuple((PIXELS / 255).mean((0, 1, 2))))
    assert std == pytest.approx(tuple((PIXELS / 255).std((0, 1, 2))))


def test_the_manifest_says_what_the_model_sees() -> None:
    classes = ("a", "b")
    train = ImageDataset(PIXELS[:4], np.array([0, 1, 0, 1]), classes, "a test")
    split = ImageSplits(train, ImageDataset(PIXELS[3:5], np.array([0, 1]), classes, "a test"))
    output = split.manifest()
    assert output["source"] == "a test"
    assert (output["train_rows"], output["held_out_rows"], output["images_in_both_splits"]) == (4, 2, 1)
    assert (output["image"], output["classes"]) == ([32, 32, 3], ["a", "b"])
    other = ImageSplits(replace(train, labels=np.array([1, 1, 0, 1])), split.test)
    assert other.fingerprint() != split.fingerprint()


def test_the_real_jpegs_are_read(shared: Path, tmp_path: Path) -> None:
    """The first 300 and 100 images of the development set, which is balanced in any stretch of ten."""
    with zipfile.ZipFile(shared / "data" / "cifar10" / "cifar10_jpeg_compact.npz") as stored:
        arrays = {name.removesuffix(".npy"): images._read_npy(stored, name) for name in stored.namelist()}
    for name, count in (("train", 300), ("test", 100)):
        lengths = arrays[f"{name}_lengths"][:count]
        arrays |= {f"{name}_lengths": lengths, f"{name}_labels": arrays[f"{name}_labels"][:count],
                   f"{name}_scans": arrays[f"{name}_scans"][: int(lengths.sum(dtype=np.int64))]}  # fmt: skip
    np.savez(tmp_path / "part.npz", **arrays)
    split = read_images("part.npz", tmp_path)
    assert split.train.images.shape == (300, 32, 32, 3)
    assert np.bincount(split.test.labels).tolist() == [10] * 10
    assert split.test.source == "CIFAR-10, lossy JPEG npz"
    mean, std = split.train.mean_and_std()
    assert mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=0.03)
    assert std == pytest.approx((0.2470, 0.2435, 0.2616), abs=0.03)


def test_reading_images_needs_no_torch(tmp_path: Path) -> None:
    jpeg_npz(tmp_path / "set.npz")
    program = f"""
import sys, pathlib
from modelwright.data.images import read_images
early = [name for name in ("torch", "PIL", "transformers") if name in sys.modules]
read_images("set.npz", pathlib.Path({str(tmp_path)!r}))
print(early, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    source = str(Path(images.__file__).parents[2])
    environment = {"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "MODELWRIGHT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_drawn_shapes_are_the_same_every_time_and_two_of_them_are_mirror_images(tmp_path: Path) -> None:
    split = read_images("shapes", tmp_path)
    assert (len(split.train), len(split.test)) == (images.SHAPES_TRAIN, images.SHAPES_TEST)
    assert np.bincount(split.train.labels).tolist() == [images.SHAPES_TRAIN // 10] * 10
    assert split.manifest()["images_in_both_splits"] == 0
    assert split.fingerprint() == read_images("shapes", tmp_path).fingerprint()
    down, across = np.mgrid[-1:1:32j, -1:1:32j]
    left, right = (images.SHAPES[name](across, down) for name in ("arrow-left", "arrow-right"))
    assert np.array_equal(left, right[:, ::-1]) and not np.array_equal(left, right)
    (tmp_path / "shapes").mkdir()
    with pytest.raises(UsageError, match="holds nothing"):
        read_images("shapes", tmp_path)  # a folder of that name goes before the embedded set
