"""Every command of the lessons parses and every recipe loads; `make test-docs` runs them and compares the output."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from lessons import BLOCK, PAGES, ROOT, Shell, blocks, commands, files, line_matches, match_output, updated_output
from modelwright.cli.main import build_app
from modelwright.recipe.load import builtin_recipes, load

PARTS = ["What you need", "An experiment of your own", "What people get wrong"]
MINUTES = 20
SHARED = Path(os.environ.get("MODELWRIGHT_SHARED") or ROOT.parent / "shared").resolve()
FILES = {"practical-skills.parquet": SHARED / "data/practical-skills-qa/qa_dataset.parquet"}
"""Optional files of the lessons."""
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@by_name
def test_a_lesson_has_its_parts(page: Path) -> None:
    titles = re.findall(r"^## (.*)$", read(page), re.MULTILINE)
    assert [title for title in titles if title in PARTS] == PARTS


@by_name
def test_every_output_in_a_lesson_follows_the_command_that_printed_it(page: Path) -> None:
    text = read(page)
    shown = sum(block.shown is not None for block in blocks(text))
    assert shown == sum(match["kind"] == "text" for match in BLOCK.finditer(text))


@by_name
def test_every_command_of_a_lesson_parses(page: Path) -> None:
    app: Any = get_command(build_app())
    for block in blocks(read(page)):
        for words in commands(block.script):
            command, rest = app, list(words)
            while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
                assert rest[0] in command.commands, f"{page.name}:{block.line}: there is no command {rest[0]}"
                command = command.commands[rest.pop(0)]
            with contextlib.suppress(typer.Exit):  # --help prints and exits
                command.make_context("modelwright", rest)


@pytest.fixture(scope="module")
def lesson_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the lessons write."""
    folder = tmp_path_factory.mktemp("lessons")
    for page in PAGES:
        for block in blocks(read(page)):
            for name, body in files(block.script):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(body, encoding="utf-8")
    return folder


@by_name
def test_every_recipe_and_setting_of_a_lesson_exists(page: Path, lesson_files: Path) -> None:
    with contextlib.chdir(lesson_files):
        for block in blocks(read(page)):
            for words in commands(block.script):
                recipe = next((word for word in words[1:] if word in builtin_recipes() or word.endswith(".yaml")), None)
                sets = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
                if recipe and words[0] != "job" and 2 not in block.exit_codes:
                    load(recipe, sets, {})


def test_the_output_of_a_page_is_compared_with_the_printed_output() -> None:
    assert line_matches(
        "sft step 2/12  loss 3.407  62 tok/s  eta 2 min 19 s", "sft step 2/12  loss 3.51  7 tok/s  eta 48 s"
    )
    assert not line_matches("sft step 2/12  loss 3.407", "sft step 2/12  loss 2.1"), (
        "a measurement differs by more than 20 %"
    )
    assert not line_matches("340 training rows", "341 training rows"), "a count differs"
    assert not line_matches("gate sft is open: eval_loss 2.4", "gate sft is closed: eval_loss 2.4"), "a word differs"
    assert line_matches("plan: 12 steps, … CPU threads", "plan: 12 steps, bf16, on 2 CPU threads")
    assert line_matches("  after: Field Note. (1) Dry", "  after: Field Note. (1) Warm")
    assert match_output(["a 1.0", "…", "d"], ["a 1.1", "b", "c", "d"]) == ["a 1.1", None, "d"]
    for shown, printed in ((["a"], ["a", "b"]), (["a", "…", "c"], ["a", "b"]), (["a", "…"], ["b", "a"])):
        with pytest.raises(AssertionError):
            match_output(shown, printed)


@pytest.fixture(scope="module")
def lessons_folder() -> Iterator[Path]:
    """The folder in which all lessons run, in order; LESSONS may name one that is kept."""
    setting = os.environ.get("LESSONS")
    if not setting:
        pytest.skip("make test-docs runs the lessons, which takes minutes")
    folder = Path(tempfile.mkdtemp(prefix="lessons-")) if setting == "1" else Path(setting).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # the pods of a simulation are other users
    for name, source in FILES.items():
        if source.exists() and not (folder / name).exists():
            (folder / name).symlink_to(source)
    yield folder
    if setting == "1":
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shell(lessons_folder: Path) -> Iterator[Shell]:
    shell = Shell(lessons_folder)
    yield shell
    shell.close()


@pytest.mark.slow
@pytest.mark.timeout(60 * 60)
@by_name
def test_a_lesson_prints_what_its_page_shows(page: Path, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    text, differences, failure = read(page), list[str](), ""
    updated, end = "", 0
    for block in blocks(text):
        if not all((shell.folder / name).exists() for name in block.needs):
            continue
        printed, codes = shell.run(block.script)
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if codes != block.exit_codes:
            tail = "\n".join(printed[-20:])
            failure = f"{where} exits with {codes or 0}, expected {block.exit_codes or 0}\n{tail}"
            break
        if block.shown is None:
            continue
        try:
            match_output(block.shown, printed)
        except AssertionError as error:
            differences.append(f"{where}: {error}")
        updated += text[end : block.span[0]] + updated_output(block, printed)
        end = block.span[1]
    with capsys.disabled():
        print(f"\n{page.stem}: {shell.seconds / 60:.1f} min")
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(updated + text[end:], encoding="utf-8")
        differences = []
    assert not failure, failure
    assert not differences, "\n".join(differences)
    assert shell.seconds < MINUTES * 60 * 2, "a lesson takes 20 minutes, on a machine that is not too busy"
