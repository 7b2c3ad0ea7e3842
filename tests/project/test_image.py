"""What can be known of the image without building it: its sources, its packages, its user, and what that one may do."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from modelwright.cluster.manifests import CONTAINER_COMMAND, IMAGE_PACKAGES, SCRATCH_DIR, build_job, needed_packages
from modelwright.errors import UsageError
from modelwright.recipe.load import builtin_recipes, load
from modelwright.recipe.sections import DEFAULT_VOLUMES

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Containerfile with its arguments, in order."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def arguments_of(word: str) -> list[str]:
    return [rest for each, rest in instructions() if each == word]


def pip_lines() -> list[list[str]]:
    return [shlex.split(line) for line in arguments_of("RUN") if line.startswith("pip ")]


def test_every_instruction_is_one_that_builders_know() -> None:
    assert {word for word, _ in instructions()} <= {"ARG", "FROM", "USER", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert instructions()[:2] == [
        ("ARG", "BASE_IMAGE=registry.access.redhat.com/ubi9/python-312:latest"),
        ("FROM", "${BASE_IMAGE}"),
    ], "a build names the base by its digest"


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text().split()
    copied = [word for line in arguments_of("COPY") for word in line.split()[:-1]]
    assert {"src", "recipes", "requirements.lock", "pyproject.toml"} <= set(copied)
    for word in copied:
        assert (ROOT / word).exists(), word
        assert not any(fnmatch(word, pattern) for pattern in ignored), word
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])
    assert needed <= set(copied), "the package cannot be built without these"


def test_pip_installs_the_lock_with_its_hashes_and_then_only_the_package() -> None:
    first, second = pip_lines()
    assert first[-2:] == ["-r", "requirements.lock"] and {"--no-deps", "--require-hashes"} <= set(first)
    assert second[-1] == "." and "--no-deps" in second
    order = [rest for _, rest in instructions()]
    assert order.index("requirements.lock ./") < order.index(shlex.join(first)) < order.index("src src")
    pins = {
        canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.M)
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {canonicalize_name(Requirement(each).name) for each in project["project"]["dependencies"]} <= pins
    assert set(IMAGE_PACKAGES) <= pins and not {"lm-eval", "torchao", "mlflow", "wandb"} & pins
    assert all("==" in each for each in project["build-system"]["requires"]), "the build's own tools are pinned"
    assert tuple(map(int, re.findall(r"\d+", project["project"]["requires-python"]))) <= (3, 12), "the image's Python"


@pytest.mark.parametrize("name", builtin_recipes())
def test_the_image_has_what_a_shipped_recipe_needs(name: str) -> None:
    assert {package for _, package in needed_packages(load(name, environ={}).recipe)} <= set(IMAGE_PACKAGES)


def test_a_recipe_that_needs_more_than_the_image_has_is_refused_unless_it_names_its_own() -> None:
    recipe = load("quickstart", ["evaluate.tasks=[piqa]", "report_to=mlflow"], {}).recipe
    with pytest.raises(UsageError, match=r"evaluate\.tasks needs lm-eval, report_to needs mlflow, which the image"):
        build_job(recipe, ROOT)
    own = load("quickstart", ["report_to=mlflow", "cluster.image=example.com/team/train:1"], {}).recipe
    assert build_job(own, ROOT).name == "quickstart"


@pytest.mark.parametrize("words", pip_lines(), ids=" ".join)
def test_pip_takes_these_words(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_user_is_a_number_and_not_root() -> None:
    assert arguments_of("USER")[-1].isdigit() and int(arguments_of("USER")[-1]) > 0, (
        "a name, or 0, is refused under runAsNonRoot"
    )
    words = [word for word, _ in instructions()]
    assert "RUN" not in words[len(words) - words[::-1].index("USER") :], "nothing is installed as that user"
    assert not any("TOKEN" in rest.upper() for _, rest in instructions())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root may give a file to group 0")
def test_any_user_of_group_0_may_write_where_a_pod_writes(tmp_path: Path) -> None:
    line = next(line for line in arguments_of("RUN") if "chgrp" in line)
    inside = re.sub(r"(?<= )/(?=\w)", f"{tmp_path}/", line)  # the step itself, on a root of its own
    subprocess.run(["sh", "-ec", f"umask 022; {inside}"], check=True)
    for folder in (SCRATCH_DIR, *(volume.mount for volume in DEFAULT_VOLUMES.values())):
        facts = (tmp_path / folder.lstrip("/")).stat()
        assert facts.st_gid == 0 and facts.st_mode & stat.S_IRWXG == stat.S_IRWXG, folder
    env = dict(each.split("=", 1) for each in arguments_of("ENV")[0].split())
    for name in ("HOME", "HF_HOME"):
        assert any(Path(env[name]).is_relative_to(folder) for folder in (SCRATCH_DIR, "/workspace")), name


def test_what_the_image_and_the_jobs_start_is_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    first, *rest = json.loads(arguments_of("CMD")[0])
    module, _, function = scripts[first].partition(":")
    run = f"import sys; from {module} import {function}; sys.argv = [{first!r}, *{rest!r}]; {function}()"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
    assert all(find_spec(word) for word in CONTAINER_COMMAND if word.startswith("modelwright"))
