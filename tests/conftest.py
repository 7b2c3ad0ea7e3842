"""What many tests share: one thread, one tiny model, and the folder of development data where it is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tiny model is slower on two threads than on one
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tied head; nobody writes into it."""
    from tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a head of its own; nobody writes into it."""
    from tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    """The tiny tokenizer."""
    from modelwright.models.pretrained import load_tokenizer

    return load_tokenizer(model_folder)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Any]:
    """Starts real processes quickly: one preloaded interpreter for all trials."""
    from tests.faults.fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of development data, which is no part of the repository."""
    folder = Path(os.environ.get("MODELWRIGHT_SHARED") or Path(__file__).parents[2] / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"no development data at {folder}; MODELWRIGHT_SHARED may say where it is")
    return folder
