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

from modelwright.cluster.manifests import CONTAINER_COMMAND, SCRATCH_DIR
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
    assert {word for word, _ in instructions()} <= {"FROM", "USER", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert instructions()[0][0] == "FROM" and len(arguments_of("FROM")) == 1
    assert arguments_of("FROM")[0].startswith("registry.access.redhat.com/ubi9/python-312")


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text().split()
    copied = [word for line in arguments_of("COPY") for word in line.split()[:-1]]
    assert {"src", "recipes", "constraints.txt", "pyproject.toml"} <= set(copied)
    for word in copied:
        assert (ROOT / word).exists(), word
        assert not any(fnmatch(word, pattern) for pattern in ignored), word
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])
    assert needed <= set(copied), "the package cannot be built without these"


def test_what_pip_is_asked_for_is_a_package_of_ours_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {
        canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    }
    packages = [word for words in pip_lines() for word in words[2:] if not word.startswith("-")]
    assert [word for word in packages if word != "constraints.txt"] == ["torch", ".[gguf,track]"]
    extras = re.findall(r"\w+", packages[-1])
    wanted = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    assert {canonicalize_name(Requirement(each).name) for each in wanted} <= pins
    assert tuple(map(int, re.findall(r"\d+", project["requires-python"]))) <= (3, 12), "the image's Python"


@pytest.mark.parametrize("words", pip_lines(), ids=" ".join)
def test_pip_takes_these_words(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    constraint = words[words.index("-c") + 1]
    before = instructions()[: instructions().index(("RUN", shlex.join(words)))]
    assert any(each == "COPY" and constraint in rest.split() for each, rest in before), "copied before it is read"


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
