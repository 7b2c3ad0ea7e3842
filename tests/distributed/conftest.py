"""One preloaded interpreter for all trials, and one uninterrupted run to hold every other against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import Rig
from tiny import tiny_recipe


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """Starts real processes quickly."""
    made = Rig()
    yield made
    made.close()


@pytest.fixture(scope="session")
def uninterrupted(rig: Rig, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output = rig.run(["run", str(tiny_recipe(folder, model_folder))], folder)
    assert code == 0, output
    return folder / "run"
