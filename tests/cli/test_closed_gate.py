"""The exit code of a run whose gate is closed is a setting of the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from modelwright.errors import GateClosed


@pytest.mark.parametrize(("setting", "raises"), [((), True), (("closed_gate_exit_code=0",), False)])
def test_a_closed_gate_fails_the_run_unless_the_recipe_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, setting: tuple[str, ...], raises: bool
) -> None:
    from modelwright.cli.run import run
    from modelwright.stages import pipeline

    def closed(*args: Any) -> None:
        raise GateClosed("gate sft is closed")

    monkeypatch.setattr(pipeline, "run", closed)
    monkeypatch.setattr("modelwright.runs.caches.prepare_environment", lambda: None)
    if raises:
        with pytest.raises(GateClosed):
            run("quickstart", list(setting), log_format="json")
    else:
        run("quickstart", list(setting), log_format="json")
