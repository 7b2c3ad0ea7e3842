"""What lies in deploy/ is what the recipes say now.

``UPDATE_GOLDEN=1 pytest tests/project/test_deploy.py`` renders deploy/ again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cluster_jobs import CRDS, crd_schema
from modelwright.cluster.documents import load_manifests
from modelwright.cluster.lint import lint
from modelwright.cluster.manifests import build_job, render
from modelwright.recipe.load import builtin_recipes, load

ROOT = Path(__file__).parents[2]
DEPLOYED = [
    name for name, path in sorted(builtin_recipes().items()) if re.search(r"^cluster:", path.read_text(), re.MULTILINE)
]
FILES = [(name, target) for name in DEPLOYED for target in ("trainjob", "pytorchjob")]


@pytest.mark.parametrize(("name", "target"), FILES)
def test_a_deployed_job_is_its_recipe(name: str, target: str) -> None:
    loaded = load(name, environ={})
    text = render(build_job(loaded.recipe, loaded.path.parent, target))  # type: ignore[arg-type]
    path = ROOT / "deploy" / f"{name}-{target}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
    assert [str(finding) for finding in lint(load_manifests(path)) if finding.is_error] == []


@pytest.mark.parametrize(("name", "target"), FILES)
def test_the_real_schemas_take_a_deployed_job(shared: Path, name: str, target: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the dev extra")
    count = 0
    for manifest in load_manifests(ROOT / "deploy" / f"{name}-{target}.yaml"):
        for crd in CRDS.get(manifest.kind, ()):
            validator = jsonschema.Draft202012Validator(crd_schema(shared, crd))
            assert [error.message for error in validator.iter_errors(manifest.body)] == []
            count += 1
    assert count == (4 if target == "trainjob" else 1)


def test_nothing_else_is_deployed() -> None:
    assert {path.name for path in (ROOT / "deploy").glob("*.yaml")} == {
        f"{name}-{target}.yaml" for name, target in FILES
    }
    assert {"resnet18-cifar10", "lyrics-pythia", "survival-smollm3"} <= set(DEPLOYED)
