"""Recipes that nobody writes by accident: each is refused in a sentence that names the setting."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import other_user
from modelwright.cli import main as cli
from modelwright.errors import RecipeError
from modelwright.recipe.load import find_recipe, load

RECIPE = """\
name: attack
model: {model_name_or_path: smollm2-135m-instruct}
data: {dataset_name: field-guide}
sft: {max_steps: 2}
env_overrides: {EPOCHS: sft.num_train_epochs, OPTIMIZER: sft.optim}
"""


def refusal(folder: Path, text: str = "", overrides: tuple[str, ...] = (), **environ: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE + text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load(path, overrides, environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora: &a\n  <<: *a\n", "<< names the mapping that it stands in; take it out"),
        ("lora: &a\n  trainable: &b\n    <<: [*b, *a]\n", "<< names the mapping that it stands in"),
        (f"seed: {2**64}\n", "seed is 18446744073709551616; it wants a whole number of at least 0 and at most 9,223,"),
        ('output_dir: "runs/a\\0b"\n', "output_dir contains a NUL character"),
        ("compare:\n  prompts: ['a\\0b', \"a\\0b\"]\n", "compare.prompts.1 contains a NUL character"),
    ],
)
def test_an_odd_value_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_an_absurd_architecture_is_refused_by_name(tmp_path: Path) -> None:
    sizes = "{num_hidden_layers: 1000000000, hidden_size: 64, num_attention_heads: 4}"
    path = tmp_path / "recipe.yaml"
    text = RECIPE.replace("{model_name_or_path: smollm2-135m-instruct}", f"{{architecture: {sizes}}}")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=r"num_hidden_layers is 1000000000; .* at most 1000"):
        load(path)


def test_bytes_that_are_not_utf8_on_the_command_line_are_the_cause_that_is_named(tmp_path: Path) -> None:
    prompt = b"data.system_prompt=\xff".decode("utf-8", "surrogateescape")
    assert (
        refusal(tmp_path, overrides=(prompt,))
        == "--set: data.system_prompt has bytes that are not UTF-8; take them out"
    )


def test_a_value_of_the_environment_is_not_printed_whole(tmp_path: Path) -> None:
    message = refusal(tmp_path, EPOCHS="correct-horse-battery", OPTIMIZER="{correct-horse-battery")
    assert "environment EPOCHS: sft.num_train_epochs is 'cor…'" in message
    assert "horse" not in message
    assert "is -1" in refusal(tmp_path, EPOCHS="-1"), "a short one is, since it explains the mistake"


def test_a_name_of_300_characters_and_a_fifo_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"x…: no such recipe file \(File name too long\)"):
        find_recipe("x" * 300)
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match="is not a regular file; it wants a recipe file"):
        find_recipe(tmp_path / "recipe.yaml")


def test_too_little_address_space_is_called_memory() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, resource.RLIM_INFINITY))

    command = [sys.executable, "-m", "modelwright", "run", "quickstart"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=240, check=False)
    message = "out of memory: run wants 1 GB of address space, more than ulimit -v allows\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_an_odd_error_under_a_small_limit_is_called_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: list[str]) -> None:
        raise SystemError("error return without exception set")

    monkeypatch.setattr(cli, "_run_app", fail)
    monkeypatch.setattr(cli, "_address_space_is_small", lambda: True)
    with pytest.raises(SystemExit):
        cli.main(["recipes"])
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [1, 2])
def test_too_few_threads_are_reported_as_a_limit(threads: int) -> None:
    if reason := other_user.unavailable():
        pytest.skip(reason)  # root has no limit
    limited = ["bash", "-c", f'ulimit -u {threads}; exec "$@"', "-"]
    command = [*limited, sys.executable, "-m", "modelwright", "run", "quickstart"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": "/nowhere"}
    user = 4320 + threads  # the limit counts all processes of a user
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        done = subprocess.run([*other_user.as_user(user, user), *command], capture_output=True, text=True, timeout=240,
                              check=False, env=environ, cwd=folder)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"no thread can be started: ulimit -u allows {threads}; a run wants 8\n"
