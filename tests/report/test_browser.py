"""Report and board in a real browser: they read well on a screen, a phone and in the dark, and nothing in them acts."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the board needs the extra board")

from browser import Window, browsing
from hostile import HOSTILE
from modelwright.report import page
from modelwright.report.board import Board
from modelwright.report.follow import Shelf
from modelwright.runs.folder import RunFolder, write_json
from modelwright.runs.journal import Journal
from served import Running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


def add_steps(journal: Journal, first: int, last: int, steps: int = 40) -> None:
    for number in range(first, last + 1):
        facts = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 900.0, "memory_bytes": 10**9}
        journal.add("step", stage="sft", step=number, steps=steps, loss=4 / number, health="ok", seconds=0.1, **facts)


def hostile_run(folder: Path) -> RunFolder:
    """A run in which every text is hostile."""
    run = RunFolder(folder / "hostile")
    journal = Journal(run.journal)
    journal.add("run", recipe=HOSTILE[2], folder=str(run.path), stages=[HOSTILE[0], "sft"], device=HOSTILE[3])
    add_steps(journal, 1, 20)
    pairs = [{"question": text, "before": text, "after": text} for text in HOSTILE]
    journal.add("answers", stage="sft", answers=pairs, notice=HOSTILE[0])
    for text in HOSTILE:
        journal.add("note", message=text)
    journal.add("verdict", stage="sft", open=False, letter=HOSTILE[1], metrics={"eval_loss": 1.0, HOSTILE[0]: 2.0})
    journal.add("stopped", exit_code=3, message=HOSTILE[2])
    journal.close()
    write_json(run.data_manifest("sft"), {"source": HOSTILE[2], HOSTILE[0]: HOSTILE[1], "train": {"rows": HOSTILE[2]}})
    checks = [{"metric": text[:200], "value": 1.0, "wants": text[:200], "passed": False} for text in HOSTILE]
    write_json(run.gate("sft"), {"open": False, "checks": checks, "metrics": {}})
    return run


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (360, "dark")])
def test_nothing_hostile_acts_in_the_report_and_nothing_breaks_it(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    path, window = page.write(hostile_run(tmp_path)), Window(browser, width, scheme)
    window.page.goto(path.as_uri())
    assert window.page.evaluate("window.harm") is None
    assert window.page.locator("#bait").count() == 0
    assert window.page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scroll"
    assert window.page.locator("section h2").count() >= 5  # a sixth where the run took long enough to book its time
    assert window.complaints == []
    assert window.asked == [path.as_uri()], "nothing is asked of anybody"
    assert path.stat().st_size < 1_000_000


def luminance(colour: str) -> float:
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_the_paper(browser: Any, tmp_path: Path, scheme: str) -> None:
    path, window = page.write(hostile_run(tmp_path)), Window(browser, 1100, scheme)
    window.page.goto(path.as_uri())
    paper = luminance(window.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    for selector in ("h1", "dt", ".key b", ".plot .y span", ".said", ".quiet li", ".gate.shut > b"):
        colour = window.page.locator(selector).first.evaluate("each => getComputedStyle(each).color")
        light, dark = sorted((paper, luminance(colour)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{selector} is {colour} in {scheme}"


def answers(folder: RunFolder, question: str) -> Iterator[tuple[str, str]]:
    """Both models, slowly: before the question as it is, after it loudly."""
    for word in question.split():
        time.sleep(0.3)
        yield "before", f"{word} "
        yield "after", f"{word.upper()} "


def test_a_live_run_is_followed_reloaded_and_asked(browser: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "live" / "journal.jsonl")
    journal.add("run", recipe="live", folder=str(tmp_path / "live"), stages=["sft"])
    (tmp_path / "live" / "recipe.yaml").write_text("name: live\n", encoding="utf-8")
    add_steps(journal, 1, 5)
    board = Board(Shelf((), tmp_path, {}), answers)
    serving, window = Running(board.application), Window(browser)
    try:
        window.page.goto(f"{serving.url}/{board.token}/")
        window.page.get_by_role("link", name="live").click()
        curve = window.page.locator("svg path.line").first
        before = curve.get_attribute("d")
        later = threading.Thread(target=lambda: (time.sleep(0.5), add_steps(journal, 6, 30)))
        later.start()
        window.page.get_by_text("30 of 40 steps").wait_for(timeout=20_000)
        later.join()
        moved = curve.get_attribute("d")
        assert moved != before, "the curve moves"
        window.page.reload()
        window.page.get_by_text("30 of 40 steps").wait_for(timeout=20_000)
        assert window.page.locator("svg path.line").first.get_attribute("d") == moved, "a reload keeps it"
        window.page.get_by_label("Question").fill("how far is it <img src=x onerror=alert(1)>")
        window.page.get_by_role("button", name="Ask").click()
        window.page.locator("[data-who=after]", has_text="HOW").wait_for(timeout=20_000)
        assert "onerror" not in (window.page.locator("[data-who=before]").text_content() or ""), "it streams"
        window.page.locator("#ask button:enabled").wait_for(timeout=20_000)
        assert (window.page.locator("[data-who=before]").text_content() or "").strip().endswith("onerror=alert(1)>")
        assert "HOW FAR IS IT" in (window.page.locator("[data-who=after]").text_content() or "")
        assert window.complaints == []
        assert all(address.startswith(serving.url) for address in window.asked)
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
    window.page.goto(page.write(run).as_uri())
    timing = window.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert window.page.get_by_text("100,000 of 100,000 steps").count() == 1
    assert timing < 2000
