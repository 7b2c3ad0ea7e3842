"""What the pages tell a person to type works: every command parses, the quick ones run, the others run on a tiny model.

A block of `bash` holds commands, and `# exits 77` after one says how it ends when that is not 0; a `text` block right
after such a line is what it then says. `<!-- file: NAME -->` before a block makes it a file that the commands find.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from modelwright.cli.main import build_app as whole_command
from modelwright.cli.main import main
from modelwright.recipe.load import builtin_recipes, dump_yaml, load
from modelwright.recipe.schema import Threshold

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LESSONS = ROOT / "docs/learn"
"""Pages with a test of their own, tests/docs."""
BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
WITHOUT_TORCH = ("check", "explain", "plan", "recipes", "schema", "convert", "--help", "--version")
ON_A_RUN = ("run", "ask", "compare", "gate", "eval", "report", "export")
ELSEWHERE = {
    "doctor": "tests/launch/test_doctor.py",
    "launch": "tests/distributed/test_launch.py",
    "job": "tests/cli/test_launch.py",
    "dashboard": "tests/report/test_dashboard.py",
    "serve": "tests/serve/test_openai_server.py",
    "chat": "tests/serve/test_generate.py",
}
"""Verbs that serve for ever, want several nodes or a cluster, or measure for minutes: run by tests of their own."""
BRIEF = [
    *("gates_file=null", "pretrain.data.max_rows=30", "pretrain.data.test_size=4", "evaluate.max_rows=4"),
    *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "prepare.vocab_size=512"),
    *(f"{stage}.max_steps=2" for stage in ("pretrain", "sft", "dpo", "lora")),
    *(f"{stage}.data.max_rows=12" for stage in ("sft", "dpo", "lora")),
    *(f"{stage}.data.test_size=2" for stage in ("sft", "dpo", "lora")),
    *("pretrain.eval_steps=null", "prepare.num_proc=1", "prepare.max_dropped_token_fraction=1"),
]
"""Overrides that make llama-tiny take seconds."""
EMBEDDED_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    where: str
    """Page and line."""
    words: tuple[str, ...]
    """The words after `modelwright`."""
    environ: dict[str, str]
    """Variables set before it."""
    exit_code: int
    """How it ends."""
    says: str
    """What it says on stderr, where the page shows it."""

    @property
    def verb(self) -> str:
        return self.words[0]

    @property
    def is_long(self) -> bool:
        """Whether it measures or trains for minutes; what wants other nodes or a cluster is tried by its own tests."""
        measures = self.verb == "plan" and {"--measure", "--calibrate"} & set(self.words)
        return bool(measures) or (self.verb in ("doctor", "launch") and not {"--on", "--nnodes"} & set(self.words))

    @property
    def page(self) -> str:
        return self.where.partition(":")[0]


def commands() -> Iterator[Command]:
    """Every `modelwright ...` of every page, in the order of reading."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if block["kind"] != "bash" or page.parent == LESSONS:
                continue
            first = text[: block.start("body")].count("\n") + 1
            after = BLOCK.match(text, block.end() + len("\n\n"))
            says = after["body"] if after and after["kind"] == "text" else ""
            for number, line in enumerate(block["body"].splitlines(), first):
                if command := command_of(line, f"{page.relative_to(ROOT)}:{number}", says):
                    yield command


def command_of(line: str, where: str, says: str = "") -> Command | None:
    """A line as a command, if it is one of ours."""
    words = shlex.split(line, comments=True)
    is_variable = [bool(re.fullmatch(r"[A-Z_]+=.*", word)) for word in words]
    start = is_variable.index(False) if False in is_variable else len(words)
    if words[start : start + 1] != ["modelwright"]:
        return None
    ending = re.search(r"# exits (\d+)", line)
    environ = dict(word.split("=", 1) for word in words[:start])
    return Command(where, tuple(words[start + 1 :]), environ, int(ending[1]) if ending else 0, says if ending else "")


def files() -> dict[str, str]:
    """The files that the pages write out."""
    bodies = {}
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if block["file"]:
                bodies[block["file"]] = block["body"]
    return bodies


ALL = list(commands())


@pytest.mark.parametrize("command", ALL, ids=lambda each: each.where)
def test_a_command_of_the_pages_has_a_verb_and_options_that_exist(command: Command) -> None:
    group: Any = get_command(whole_command())
    rest = list(command.words)
    while hasattr(group, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in group.commands, f"{command.where}: there is no command {rest[0]}"
        group = group.commands[rest.pop(0)]
    with contextlib.suppress(typer.Exit):  # --help prints and leaves
        group.make_context("modelwright", rest)


@pytest.mark.parametrize("page", dict.fromkeys(each.page for each in ALL if each.verb in WITHOUT_TORCH))
def test_the_quick_commands_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    for command in ALL:
        if command.page == page and command.verb in WITHOUT_TORCH and not command.is_long:
            with monkeypatch.context() as patch:
                for name, value in command.environ.items():
                    patch.setenv(name, value)
                code = run(tmp_path, *command.words)
            stderr = capsys.readouterr().err
            assert code == command.exit_code, f"{command.where}: {stderr}"
            assert stderr.split() == command.says.split() or not command.says, command.where


def test_every_command_of_the_pages_is_run_by_some_test() -> None:
    for command in ALL:
        test_file = ELSEWHERE.get(command.verb)
        assert command.verb in (*WITHOUT_TORCH, *ON_A_RUN, "data") or test_file, (
            f"{command.where}: nobody runs {command.verb}"
        )
        if test_file:
            assert command.verb in (ROOT / test_file).read_text(encoding="utf-8"), f"{test_file} says nothing of it"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder where every recipe of the pages has been run, each with a tiny model in place of the embedded one.

    A file goes before a shipped recipe of its name, so that `modelwright run quickstart` means the tiny one here.
    """
    folder = tmp_path_factory.mktemp("reader")
    for name, body in files().items():
        # in a dozen steps a tiny model learns nothing at 2e-5
        body = body.replace(EMBEDDED_MODEL, str(model_folder)).replace("learning_rate: 2e-5", "learning_rate: 2e-3")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")
    small = ("data.max_rows=60", "sft.max_steps=6", "compare.max_new_tokens=8", "evaluate.answers.max_prompts=4")
    overrides = [f"model.model_name_or_path={model_folder}", *small]
    recipe = load("quickstart", overrides, {}).recipe
    gates = {"sft": {"eval_loss": Threshold(at_most=1.0, times="base_eval_loss")}}
    (folder / "quickstart").write_text(dump_yaml(recipe.model_copy(update={"gates": gates})), encoding="utf-8")
    (folder / "llama-tiny").write_text(dump_yaml(load("llama-tiny", BRIEF, {}).recipe), encoding="utf-8")
    started = dict.fromkeys(command.words[1] for command in ALL if command.verb == "run")
    for name in started:
        assert run(folder, "run", name) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in ALL if each.verb in ON_A_RUN], ids=lambda each: each.where)
def test_a_command_of_the_pages_works_on_a_finished_run(
    command: Command, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in command.environ.items():
        monkeypatch.setenv(name, value)
    assert run(workspace, *command.words) == command.exit_code, command.where
    assert capsys.readouterr().err.split() == command.says.split() or not command.says, command.where


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [each for each in ALL if each.is_long], ids=lambda each: each.where)
def test_a_long_command_of_the_pages_works(command: Command, workspace: Path) -> None:
    if not os.environ.get("NIGHTLY"):
        pytest.skip("it takes minutes; make nightly runs it")
    words = [word for word in command.words if word != "--save"]  # a trial leaves the kept figures alone
    program = [sys.executable, "-m", "modelwright", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **command.environ}
    done = subprocess.run(program, cwd=workspace, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == command.exit_code, f"{command.where}: {done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder with the files of the pages and a quickstart that means the tiny model; nothing has been run in it."""
    folder = tmp_path_factory.mktemp("desk")
    for name, body in files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")
    recipe = load("quickstart", [f"model.model_name_or_path={model_folder}"], {}).recipe
    (folder / "quickstart").write_text(dump_yaml(recipe), encoding="utf-8")
    return folder


@pytest.mark.parametrize("command", [each for each in ALL if each.verb == "data"], ids=lambda each: each.where)
def test_a_data_command_of_the_pages_works(command: Command, desk: Path) -> None:
    assert run(desk, *command.words) == command.exit_code, command.where


def run(folder: Path, *arguments: str) -> int:
    """Run a command in this process, standing in a folder, and return its exit code."""
    with contextlib.chdir(folder):
        try:
            main(list(arguments))
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def test_the_pages_show_every_verb_that_a_person_needs_first() -> None:
    shown = {command.verb for command in ALL if command.where.startswith("README.md")}
    assert {"check", "explain", "run", "ask", "compare", "gate"} <= shown


def test_the_table_of_recipes_names_what_is_shipped_and_nothing_else() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[[\w-]+\]\(recipes/([\w-]+)\.yaml\)", readme, re.MULTILINE)) == sorted(
        builtin_recipes()
    )


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_make_targets_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"^make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    known = {file.name for folder in ("src", "tests") for file in (ROOT / folder).rglob("*.py")}
    for name in re.findall(r"`((?:(?:src|tests|docs|recipes|bench)/[\w/.-]+)|\w+\.py)`", text):
        if "/" in name or page.name != "systems.md":  # which names the scripts of the documents
            assert (ROOT / name).exists() if "/" in name else name in known, f"{page.name} names {name}"
