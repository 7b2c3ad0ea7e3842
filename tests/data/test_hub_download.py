"""A hub dataset is read like a file: by configuration and split, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fake_hub import Files, hub

DATASET_CARD = b"""---
configs:
- config_name: plain
  data_files:
  - {split: train, path: plain/train.jsonl}
  - {split: test, path: plain/test.jsonl}
- config_name: other
  data_files: other/train.jsonl
---
"""
READ = """
import json, sys
from pathlib import Path
from modelwright.data import download, sources
from modelwright.data.prepare import pipeline
from modelwright.data.prepare.executors import SerialExecutor
from modelwright.data.prepare.job import PrepareJob
from modelwright.errors import ModelwrightError
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.prepare_config import PrepareConfig
download.load_hub_dataset.__defaults__ = ((0.0, 0.0),)
results = {}
for request in sys.argv[2:]:
    name, config, split = request.split(":")
    data = DataConfig(dataset_name=f"owner/{name}", dataset_config_name=config or None, dataset_split=split)
    try:
        results[request] = [row.values["text"].split()[0] for row in sources.iter_rows(data.source, data, Path())]
    except ModelwrightError as error:
        results[request] = f"{type(error).__name__}: {error}"
data = DataConfig(dataset_name="owner/good", dataset_config_name="other", test_size=2)
settings = PrepareConfig(
    sequence_length=32, vocab_size=300, use_gigatoken=False, minhash_dedup=False, max_repeated_ngrams=1
)
folder = Path(sys.argv[1])
for _ in pipeline.run_pipeline(PrepareJob.make(folder, data, settings, 1, folder, None), SerialExecutor()):
    pass
results["prepared"] = json.loads((folder / "report.json").read_text())["documents"]
print(json.dumps(results))
"""


def rows(word: str, count: int) -> bytes:
    lines = [{"text": f"{word} number {n}, and {n * n} more words about {n} of {word} follow"} for n in range(count)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


FILES: Files = {"README.md": DATASET_CARD, "plain/train.jsonl": rows("plain", 300), "plain/test.jsonl": rows("test", 5),
                "other/train.jsonl": rows("other", 40)}  # fmt: skip
SCRIPT = {"cut": ["cut"], "down": ["500", "500"], "lie": ["lie"], "gone": ["500"] * 9}


def environment(address: str, home: Path) -> dict[str, str]:
    """The variables of a process that knows this hub alone."""
    env = {name: value for name, value in os.environ.items() if name not in ("HF_DATASETS_CACHE", "HF_HUB_CACHE")}
    return {**env, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "hf_of_nobody",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src")}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process reads from a hub that has its moods: the library finds its address only when it starts."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("packed")
    with hub({f"owner/{name}": FILES for name in ("good", *SCRIPT)}) as server:
        server.script = {f"owner/{name}/plain/train.jsonl": [*words] for name, words in SCRIPT.items()}
        requests = ["good:plain:train", "good:plain:test", "good:other:train", "good:none:train", "good:plain:none",
                 "cut:plain:train", "down:plain:train", "lie:plain:train", "gone:plain:train"]  # fmt: skip
        env = environment(server.address, home)
        command = [sys.executable, "-c", READ, str(folder), *requests]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        sizes = {path.stat().st_size for path in home.glob("hub/*/snapshots/**/*") if path.is_file()}
        return {**result, "requests": list(server.requests), "sizes": sizes}


def test_configuration_and_split_say_which_rows_are_read(results: dict[str, Any]) -> None:
    assert results["good:plain:train"] == ["plain"] * 300
    assert results["good:plain:test"] == ["test"] * 5
    assert results["good:other:train"] == ["other"] * 40


def test_a_wrong_configuration_or_split_is_an_error(results: dict[str, Any]) -> None:
    for requests in ("good:none:train", "good:plain:none"):
        assert results[requests].startswith(
            "UsageError: data: 'owner/good' is no local file or folder, and the hub gave no"
        )
        assert "dataset_config_name and dataset_split" in results[requests]


def test_a_file_cut_half_way_is_asked_for_again_and_comes_whole(results: dict[str, Any]) -> None:
    assert results["cut:plain:train"] == ["plain"] * 300
    requests = [
        line for line in results["requests"] if line.startswith("GET datasets/owner/cut") and "plain/train" in line
    ]
    assert len(requests) == 2


def test_a_hub_that_fails_twice_or_lies_about_a_size_is_asked_again(results: dict[str, Any]) -> None:
    assert results["down:plain:train"] == results["lie:plain:train"] == ["plain"] * 300


def test_a_hub_that_always_fails_is_an_error_and_no_half_file_is_kept(results: dict[str, Any]) -> None:
    assert results["gone:plain:train"].startswith(
        "DataError: owner/gone: the data set did not arrive in 3 tries (last: "
    )
    assert results["sizes"] == {len(data) for data in FILES.values()}


def test_a_preparation_reads_the_hub_through_the_same_door(results: dict[str, Any]) -> None:
    assert results["prepared"]["read"] == 40 and results["prepared"]["held_out"] == 2


def large_set() -> bytes:
    """A Parquet file of 24 MB that cannot be compressed, and little to read in it."""
    draw = random.Random(1)
    columns = {
        "prompt": [f"What is {n} and {n}?" for n in range(24)],
        "completion": [f"It is {2 * n}." for n in range(24)],
        "ballast": [draw.randbytes(500_000).hex() for _ in range(24)],
    }
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, compression="none", use_dictionary=False)
    return file.getvalue()


def test_a_large_file_cut_and_killed_half_way_is_resumed_by_the_next_command(tmp_path: Path) -> None:
    data, home = large_set(), tmp_path / "home"
    command = [sys.executable, "-m", "modelwright", "data", "audit", "owner/large", "--json"]
    blobs = home / "hub/datasets--owner--large/blobs"
    partial = blobs / f".{hashlib.sha256(data).hexdigest()}.partial"
    with hub({"owner/large": {"train.parquet": data}}) as server:
        env, end = environment(server.address, home), time.monotonic() + 120
        server.script = {"owner/large/train.parquet": ["cut:3000000", "stall:9000000"]}
        process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
        while not (partial.exists() and partial.stat().st_size >= 11_000_000):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.kill()
        process.wait()
        reached, before = partial.stat().st_size, len(server.requests)
        assert [path.name for path in blobs.iterdir()] == [partial.name], "half a file never bears the file's name"
        server.script = {"owner/large/train.parquet": ["500", *["cut:2000000"] * 5, "whole"]}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        ranges = [line.split()[-1] for line in server.requests[before:] if line.startswith("GET datasets/owner/large")]
    assert ranges == [f"bytes={reached + 2_000_000 * cuts}-" for cuts in (0, 0, 1, 2, 3, 4, 5)]
    assert json.loads(done.stdout)["data"]["owner/large"]["rows"] == 24
    assert [path.read_bytes() == data for path in blobs.iterdir()] == [True]


def test_an_open_corpus_fills_a_folder_resumes_and_is_repaired(tmp_path: Path) -> None:
    parts = {f"wikitext-103-raw-v1/{name}": rows(name, 30) for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl")}
    command = [sys.executable, "-m", "modelwright", "data", "download", "wikitext-103", "--json"]
    folder = tmp_path / "data/raw"
    with hub({"Salesforce/wikitext": {"README.md": b"Text.", **parts}}) as server:
        env = environment(server.address, tmp_path / "home")
        server.script = {"Salesforce/wikitext/wikitext-103-raw-v1/train-0.jsonl": ["cut:100", "500"]}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "GET datasets/Salesforce/wikitext/resolve" in "".join(server.requests)
        assert any(request.endswith("bytes=100-") for request in server.requests), "it went on where it was cut"
        assert "left out as held-out data: test.jsonl" in done.stderr
        manifest = json.loads(done.stdout)
        assert list(manifest["files"]) == ["train-0.jsonl", "train-1.jsonl"] and len(manifest["revision"]) == 40
        (folder / "train-1.jsonl").write_bytes(b"damaged")
        again = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert "train-1.jsonl is damaged; it is downloaded again" in again.stderr
        other = [*command[:-2], "tinystories"]
        refused = subprocess.run(other, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert refused.returncode == 2 and "holds wikitext-103; another corpus wants another --output" in refused.stderr
    expected = {name.split("/")[1]: data for name, data in parts.items() if "train" in name}
    assert {path.name: path.read_bytes() for path in folder.glob("*.jsonl")} == expected
