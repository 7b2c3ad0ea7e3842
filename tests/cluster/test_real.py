"""What the script for a real cluster does before it needs a binary; the script itself has not been run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from modelwright.cluster.manifests import build_job
from modelwright.recipe.load import load
from tests.cluster.real import operators
from tests.cluster.real.operators import ABSENT_EXIT_CODE, BINARIES, CLUSTER_SETTINGS, FILES, OPERATORS, TINY_RECIPES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A file for everything that the script wants."""
    for name in (*BINARIES, *FILES):
        (tmp_path / name).touch(mode=0o755)
    return {name: str(tmp_path / name) for name in (*BINARIES, *FILES)}


def test_absent_binaries_are_named_and_have_an_exit_code_of_their_own() -> None:
    command = [sys.executable, "-m", "tests.cluster.real.operators"]
    environ = {"PYTHONPATH": str(ROOT / "src"), "ETCD": "/none"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == ABSENT_EXIT_CODE == 69 and done.stdout == ""
    assert done.stderr.startswith("nothing was tried; not here:\n  ETCD is /none, which is not a program\n")
    assert all(name in done.stderr for name in (*BINARIES, *FILES))


def test_a_file_that_is_no_program_is_absent(environ: dict[str, str]) -> None:
    assert operators.absent(environ) == []
    Path(environ["KUBELET"]).chmod(0o644)
    assert operators.absent(environ) == [f"KUBELET is {environ['KUBELET']}, which is not a program"]


def test_the_parts_read_files_that_are_rendered(environ: dict[str, str], tmp_path: Path) -> None:
    files = operators.configuration_files(tmp_path, environ, "192.0.2.7")
    assert not [name for name, text in files.items() if "${" in text]
    for name in ("kubeconfig", "kubelet.yaml", "project.yaml", "jobset.yaml", "trainer.yaml", "cni/10-pods.conflist"):
        assert list(YAML(typ="safe").load_all(files[name])), name
    commands = operators.commands(tmp_path, environ, "192.0.2.7")
    assert list(commands)[:2] == ["etcd", "kube-apiserver"]
    words = " ".join(word for command in commands.values() for word in command)
    for name in ("kubeconfig", "containerd.toml", "kubelet.yaml", "tokens.csv"):
        assert f"{tmp_path}/{name}" in words and name in files
    for operator in OPERATORS:
        named = [word.partition("=")[2] for word in operator.args if word.endswith(".yaml")]
        assert named and set(named) <= set(files), operator.binary


def test_webhooks_are_reached_where_the_operator_listens(environ: dict[str, str], tmp_path: Path) -> None:
    files = operators.configuration_files(tmp_path, environ, "192.0.2.7")
    for operator in OPERATORS:
        service, endpoints = operators.webhook_service(operator, "192.0.2.7")
        assert service["metadata"] == {"name": operator.service, "namespace": operator.namespace}
        assert endpoints["endpoints"] == [{"addresses": ["192.0.2.7"]}]
        assert endpoints["ports"][0]["port"] == operator.port
        assert str(operator.port) in json.dumps(
            [*operator.args, *(files[word[9:]] for word in operator.args if word[9:] in files)]
        )
    assert len({operator.port for operator in OPERATORS}) == len(OPERATORS)


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
@pytest.mark.parametrize(("recipe", "settings"), TINY_RECIPES)
def test_the_tiny_recipes_are_jobs_of_two_pods_without_gpus(recipe: str, settings: list[str], kind: str) -> None:
    loaded = load(recipe, [*CLUSTER_SETTINGS, f"name={recipe}-{kind}", *settings], {})
    job = build_job(loaded.recipe, ROOT, kind)  # type: ignore[arg-type]
    assert (job.name, job.cluster.nodes, job.cluster.gpus_per_node) == (f"{recipe}-{kind}", 2, 0)
    volumes = {document["metadata"]["name"] for document in YAML(typ="safe").load_all(
        (operators.CONFIG / "project.yaml").read_text()) if document["kind"] == "PersistentVolume"}  # fmt: skip
    assert set(job.cluster.volumes) <= volumes
