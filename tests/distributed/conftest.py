"""One uninterrupted run to hold every other against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer
from tiny import tiny_recipe


@pytest.fixture(scope="session")
def uninterrupted(fork_server: ForkServer, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output = fork_server.run(["run", str(tiny_recipe(folder, model_folder))], folder)
    assert code == 0, output
    return folder / "run"
