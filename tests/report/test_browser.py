"""Report and board in a real browser: they read well on a screen, a phone and in the dark, and nothing in them acts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("starlette", reason="the dashboard needs the extra dashboard")


from browser import Window, browsing
from modelwright.cli.model import make_ask_handler
from modelwright.models.pretrained import load_model, load_tokenizer
from modelwright.report import html
from modelwright.report.dashboard import Dashboard, RunIndex
from modelwright.runs.folder import RUN_FORMAT, RunFolder, write_json
from modelwright.runs.journal import Journal
from modelwright.stages.compare import RunModels
from tests.faults.fork_server import ForkServer, wait_for_step
from tests.faults.hostile import HOSTILE
from tests.faults.http_requests import LiveServer
from tiny import tiny_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as instance:
        yield instance


def add_steps(journal: Journal, first: int, last: int, steps: int = 40) -> None:
    for number in range(first, last + 1):
        facts = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 900.0, "peak_memory_bytes": 10**9}
        journal.add(
            "step", stage="sft", step=number, steps=steps, loss=4 / number, health="ok", step_seconds=0.1, **facts
        )


def hostile_run(folder: Path) -> RunFolder:
    """A run in which every text is hostile."""
    run = RunFolder(folder / "hostile")
    journal = Journal(run.journal)
    journal.add("run", run_format=RUN_FORMAT, recipe=HOSTILE[2], folder=str(run.path), stages=[HOSTILE[0], "sft"],
                device=HOSTILE[3])  # fmt: skip
    add_steps(journal, 1, 20)
    pairs = [{"question": text, "before": text, "after": text} for text in HOSTILE]
    journal.add("answers", stage="sft", answers=pairs, notice=HOSTILE[0])
    for text in HOSTILE:
        journal.add("note", message=text)
    journal.add("verdict", stage="sft", open=False, message=HOSTILE[1], metrics={"eval_loss": 1.0, HOSTILE[0]: 2.0})
    journal.add("stopped", exit_code=3, message=HOSTILE[2])
    journal.close()
    write_json(run.data_manifest("sft"), {"source": HOSTILE[2], HOSTILE[0]: HOSTILE[1], "train": {"rows": HOSTILE[2]}})
    checks = [{"metric": text[:200], "value": 1.0, "requirement": text[:200], "passed": False} for text in HOSTILE]
    write_json(run.gate("sft"), {"open": False, "checks": checks, "metrics": {}})
    return run


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (360, "dark")])
def test_nothing_hostile_acts_in_the_report_and_nothing_breaks_it(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    path, window = html.write_report(hostile_run(tmp_path)), Window(browser, width, scheme)
    window.page.goto(path.as_uri())
    assert window.page.evaluate("window.harm") is None
    assert window.page.locator("#bait").count() == 0
    assert window.page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scroll"
    assert window.page.locator("section h2").count() >= 5  # a sixth where the run took long enough to book its time
    assert window.complaints == []
    assert window.requests == [path.as_uri()], "nothing is asked of anybody"
    assert path.stat().st_size < 1_000_000


def tooltip(window: Window) -> str:
    return " ".join(window.page.locator(".tip").inner_text().split())


def test_a_tooltip_names_the_step_of_each_value(browser: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    journal = Journal(run.journal)
    journal.add("run", run_format=RUN_FORMAT, recipe="x", folder=str(run.path), stages=["sft"], device="cpu")
    journal.add("evaluation", stage="sft", step=0, eval_loss=3.0)
    add_steps(journal, 1, 40)
    journal.add("evaluation", stage="sft", step=40, eval_loss=1.0)
    journal.close()
    window = Window(browser, 1100, "light")
    window.page.goto(html.write_report(run).as_uri())
    chart = window.page.locator("svg[data-lines]").first
    box = chart.bounding_box()
    for part, shown in (
        (0.3, "step 12 training 0.3333 held out 3 (step 0)"),
        (1, "step 40 training 0.1 held out 1"),
    ):
        chart.hover(position={"x": min(part * box["width"], box["width"] - 1), "y": 20})
        assert tooltip(window) == shown


def plain_run(folder: Path, name: str, loss: float, state: str = "done") -> RunFolder:
    run = RunFolder(folder / name)
    with closing(Journal(run.journal)) as journal:
        journal.add("run", run_format=RUN_FORMAT, recipe=name, folder=str(run.path), stages=["sft"], device="cpu")
        add_steps(journal, 1, 40)
        journal.add("verdict", stage="sft", open=True, message="", metrics={"eval_loss": loss})
        journal.add(state, exit_code=75, message="")
    return run


def test_a_chart_is_read_by_keyboard_and_saved_as_csv(browser: Any, tmp_path: Path) -> None:
    window = Window(browser, 360)
    window.page.goto(html.write_report(plain_run(tmp_path, "run", 1.0)).as_uri())
    axis = window.page.locator(".plot .x").first
    assert axis.locator("span").count() >= 4 and axis.locator("em").inner_text() == "step"
    window.page.locator("svg[data-lines]").first.focus()
    for key, shown in (
        ("ArrowRight", "step 1 training 4"),
        ("ArrowRight", "step 2 training 2"),
        ("ArrowLeft", "step 1 training 4"),
        ("End", "step 40 training 0.1"),
    ):
        window.page.keyboard.press(key)
        assert tooltip(window) == shown
    window.page.keyboard.press("Escape")
    assert window.page.locator(".tip").is_hidden()
    with window.page.expect_download() as download:
        window.page.get_by_role("button", name="CSV").first.click()
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert download.value.suggested_filename == "loss.csv" and lines[:3] == ['step,"training"', "1,4", "2,2"]
    assert len(lines) == 41 and window.complaints == []
    assert "sft step 40/40" in window.page.locator(".log").text_content()


def test_the_list_of_runs_is_sorted_and_filtered(browser: Any, tmp_path: Path) -> None:
    for name, loss, state in (("apple", 3.0, "done"), ("berry", 1.0, "stopped"), ("cherry", 2.0, "done")):
        plain_run(tmp_path, name, loss, state)
    board = Dashboard(RunIndex((), tmp_path, {}), make_ask_handler())
    serving, window = LiveServer(board.application), Window(browser)
    names = window.page.locator("table.runs tr:not([hidden]) th a")
    try:
        with window.page.expect_response(re.compile("/events$")):
            window.page.goto(f"{serving.url}/{board.token}/")
        sort = window.page.get_by_role("button", name="held-out loss")
        sort.press("Enter")
        assert names.all_inner_texts() == ["berry", "cherry", "apple"]
        sort.click()
        assert names.all_inner_texts() == ["apple", "cherry", "berry"]
        window.page.get_by_label("Filter runs").fill("finished")
        assert names.all_inner_texts() == ["apple", "cherry"]
        assert window.complaints == []
    finally:
        window.page.close()
        serving.close()


WATCH = """
window.grown = {before: 0, after: 0};
for (const who of ["before", "after"]) {
  new MutationObserver((changes) => { window.grown[who] += changes.length; }).observe(
    document.querySelector(`[data-who=${who}]`), {childList: true});
}
"""
"""Counts how often each answer grows."""


HELD = """
import pathlib, time
from modelwright.engine.trainer import Engine
quick = Engine._step
def held(self, stop_asked):
    while self.cursor.step >= 10 and not pathlib.Path("go on").exists():
        time.sleep(0.05)
    return quick(self, stop_asked)
Engine._step = held
"""
"""Put first in a trial, this stops it after ten steps until a file is there."""


@pytest.fixture
def loud_model(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with weights so large that it has something to say."""
    model = load_model(model_folder)
    torch.manual_seed(3)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path / "loud")
    load_tokenizer(model_folder).save_pretrained(tmp_path / "loud")
    return tmp_path / "loud"


def test_a_live_run_is_followed_reloaded_and_asked(
    browser: Any, fork_server: ForkServer, loud_model: Path, tmp_path: Path
) -> None:
    """A real run, and a real model before and after."""
    recipe = tiny_recipe(tmp_path, loud_model, max_steps=20, learning_rate=1e-4)
    trial = fork_server.start(["run", str(recipe), "--set", "compare.max_new_tokens=16"], tmp_path, first=HELD)
    wait_for_step(tmp_path / "run", 10)
    board = Dashboard(RunIndex((), tmp_path, {}), make_ask_handler())
    serving, window = LiveServer(board.application), Window(browser)
    shown = window.page
    try:
        shown.goto(f"{serving.url}/{board.token}/")
        shown.get_by_role("link", name="tiny").click()
        shown.get_by_text("10 of 20 steps").first.wait_for(timeout=60_000)
        curve = shown.locator("svg path.line").first
        before = curve.get_attribute("d")
        (tmp_path / "go on").touch()
        shown.get_by_text("20 of 20 steps").first.wait_for(timeout=60_000)
        assert curve.get_attribute("d") != before, "the curve moves"
        assert trial.wait() == 0, trial.output
        shown.get_by_text("finished").first.wait_for(timeout=60_000)
        moved = curve.get_attribute("d")
        shown.reload()
        assert curve.get_attribute("d") == moved, "a reload keeps it"
        shown.evaluate(WATCH)
        question = "how far is it <img src=x onerror=alert(1)>"
        shown.get_by_label("Question").fill(question)
        shown.get_by_role("button", name="Ask").click()
        shown.locator("#ask button:enabled").wait_for(timeout=120_000)
        asker = RunModels(RunFolder(tmp_path / "run"))
        for who in ("before", "after"):
            pieces = list(asker.generator(who).stream(asker.messages(question)))
            assert shown.locator(f"[data-who={who}]").text_content().strip() == "".join(pieces).strip()
            assert shown.evaluate(f"window.grown.{who}") >= len(pieces) > 1, "it streams"
        assert window.complaints == []
        assert all(address.startswith(serving.url) for address in window.requests)
    finally:
        shown.close()
        serving.close()


def test_a_link_is_followed_though_the_list_changes_while_it_is_pressed(browser: Any, tmp_path: Path) -> None:
    with closing(Journal(RunFolder(tmp_path / "run").journal)) as journal:
        journal.add("run", run_format=RUN_FORMAT, recipe="first", folder=str(tmp_path), stages=["sft"], device="cpu")
        add_steps(journal, 1, 20)
        board = Dashboard(RunIndex((), tmp_path, {}), make_ask_handler())
        serving, window = LiveServer(board.application), Window(browser)
        try:
            with window.page.expect_response(re.compile("/events$")):
                window.page.goto(f"{serving.url}/{board.token}/")
            window.page.wait_for_timeout(1000)
            window.page.get_by_role("link", name="first").hover()
            window.page.mouse.down()
            add_steps(journal, 21, 30)
            window.page.wait_for_timeout(3000)
            window.page.mouse.up()
            window.page.get_by_text("30 of 40 steps").first.wait_for(timeout=20_000)
        finally:
            window.page.close()
            serving.close()


def test_a_report_of_100_000_steps_opens_in_under_two_seconds(browser: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "long")
    run.path.mkdir()
    tail = '"event": "step", "stage": "sft", "steps": 100000, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-4}'
    with run.journal.open("w", encoding="utf-8") as file:
        file.writelines(f'{{"time": {number}, "step": {number}, {tail}\n' for number in range(1, 100_001))
    window = Window(browser)
    window.page.goto(html.write_report(run).as_uri())
    timing = window.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert window.page.get_by_text("100,000 of 100,000 steps").count() == 1
    assert timing < 2000
