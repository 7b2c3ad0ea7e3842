"""The lessons do as they say: here every command parses and every recipe loads; `make test-docs` types them in."""

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

from lessons import BLOCK, PAGES, ROOT, Shell, blocks, commands, files, hold, refreshed, same
from modelwright.cli.main import build_app as whole_command
from modelwright.recipe.load import builtin_recipes, load

PARTS = ["What you need", "An experiment of your own", "What people get wrong"]
MINUTES = 20
SHARED = Path(os.environ.get("MODELWRIGHT_SHARED") or ROOT.parent / "shared").resolve()
FILES = {"practical-skills.parquet": SHARED / "data/practical-skills-qa/qa_dataset.parquet"}
"""What a lesson uses where it is there, and can do without."""
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@by_name
def test_a_lesson_has_its_parts(page: Path) -> None:
    titles = re.findall(r"^## (.*)$", read(page), re.MULTILINE)
    assert [title for title in titles if title in PARTS] == PARTS


@by_name
def test_every_output_in_a_lesson_stands_below_the_command_that_printed_it(page: Path) -> None:
    text = read(page)
    shown = sum(block.shown is not None for block in blocks(text))
    assert shown == sum(found["kind"] == "text" for found in BLOCK.finditer(text))


@by_name
def test_every_command_of_a_lesson_parses(page: Path) -> None:
    whole: Any = get_command(whole_command())
    for block in blocks(read(page)):
        for words in commands(block.script):
            found, rest = whole, list(words)
            while hasattr(found, "commands") and rest and not rest[0].startswith("-"):
                assert rest[0] in found.commands, f"{page.name}:{block.line}: there is no command {rest[0]}"
                found = found.commands[rest.pop(0)]
            with contextlib.suppress(typer.Exit):  # --help prints and leaves
                found.make_context("modelwright", rest)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the lessons write."""
    folder = tmp_path_factory.mktemp("desk")
    for page in PAGES:
        for block in blocks(read(page)):
            for name, body in files(block.script):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(body, encoding="utf-8")
    return folder


@by_name
def test_every_recipe_and_setting_of_a_lesson_exists(page: Path, desk: Path) -> None:
    with contextlib.chdir(desk):
        for block in blocks(read(page)):
            for words in commands(block.script):
                recipe = next((word for word in words[1:] if word in builtin_recipes() or word.endswith(".yaml")), None)
                sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
                if recipe and words[0] != "job" and 2 not in block.endings:
                    load(recipe, sets, {})


def test_what_a_page_shows_is_held_against_what_is_printed() -> None:
    assert same("sft step 2/12  loss 3.407  62 tok/s  eta 2 min 19 s", "sft step 2/12  loss 3.51  7 tok/s  eta 48 s")
    assert not same("sft step 2/12  loss 3.407", "sft step 2/12  loss 2.1"), "a measure is off by more than a fifth"
    assert not same("340 training rows", "341 training rows"), "a count is not the same"
    assert not same("gate sft is open: eval_loss 2.4", "gate sft is closed: eval_loss 2.4"), "a word is not the same"
    assert same("plan: 12 steps, … CPU threads", "plan: 12 steps, bf16, on 2 CPU threads")
    assert same("  after: Field Note. (1) Dry", "  after: Field Note. (1) Warm")
    assert hold(["a 1.0", "…", "d"], ["a 1.1", "b", "c", "d"]) == ["a 1.1", None, "d"]
    for shown, printed in ((["a"], ["a", "b"]), (["a", "…", "c"], ["a", "b"]), (["a", "…"], ["b", "a"])):
        with pytest.raises(AssertionError):
            hold(shown, printed)


@pytest.fixture(scope="module")
def classroom() -> Iterator[Path]:
    """The folder in which all lessons are typed, one after the other: LESSONS names one that is kept."""
    wish = os.environ.get("LESSONS")
    if not wish:
        pytest.skip("make test-docs types the lessons in, which takes minutes")
    folder = Path(tempfile.mkdtemp(prefix="lessons-")) if wish == "1" else Path(wish).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # the pods of a simulation are other users
    for name, at_hand in FILES.items():
        if at_hand.exists() and not (folder / name).exists():
            (folder / name).symlink_to(at_hand)
    yield folder
    if wish == "1":
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shell(classroom: Path) -> Iterator[Shell]:
    made = Shell(classroom)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(60 * 60)
@by_name
def test_a_lesson_does_as_it_says(page: Path, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    text, differ, stopped = read(page), list[str](), ""
    renewed, end = "", 0
    for block in blocks(text):
        if not all((shell.folder / name).exists() for name in block.needs):
            continue
        printed, codes = shell.type(block.script)
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if codes != block.endings:
            tail = "\n".join(printed[-20:])
            stopped = f"{where} ends with {codes or 0}, announced is {block.endings or 0}\n{tail}"
            break
        if block.shown is None:
            continue
        try:
            hold(block.shown, printed)
        except AssertionError as error:
            differ.append(f"{where}: {error}")
        renewed += text[end : block.span[0]] + refreshed(block, printed)
        end = block.span[1]
    with capsys.disabled():
        print(f"\n{page.stem}: {shell.seconds / 60:.1f} min")
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(renewed + text[end:], encoding="utf-8")
        differ = []
    assert not stopped, stopped
    assert not differ, "\n".join(differ)
    assert shell.seconds < MINUTES * 60 * 2, "a lesson is over in 20 minutes, on a machine that is not too busy"
