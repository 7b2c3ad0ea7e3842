"""Plans are tested with the shipped coefficients, not with those measured on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_coefficients_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path))
