"""Every page of report and board in a real browser: three long runs overlaid, contrast, words, keyboard, speed.

    python -m pytest -s tests/report/test_pages_in_browser.py

prints how long each action took, and how busy the machine was.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the dashboard needs the extra dashboard")

from browser import Window, browsing
from docs.screenshots import SAMPLE
from modelwright.cli.model import make_ask_handler
from modelwright.report import html
from modelwright.report.dashboard import Dashboard, RunIndex
from modelwright.runs.folder import RUN_FORMAT, RunFolder, write_json
from tests.faults.http_requests import LiveServer

pytestmark = pytest.mark.slow

STEPS = 20_000
LIMIT_MS = 300.0
"""From an action to its result on the screen, on a machine that has nothing else to do."""
LONG_RUNS = {"lora-r8": 1.4, "lora-r64": 1.5, "full": 1.6}
"""Runs of 20,000 steps and the loss that each ends with."""
SIZES = [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")]


def write_journal(run: RunFolder, events: list[dict[str, Any]]) -> None:
    run.path.mkdir(parents=True)
    lines = [json.dumps({"time": 1000.0 + number, **event}) for number, event in enumerate(events)]
    run.journal.write_text("\n".join(lines) + "\n", encoding="utf-8")


def long_run(folder: Path, name: str, final_loss: float) -> None:
    first = {"event": "run", "run_format": RUN_FORMAT, "recipe": name, "folder": name, "stages": ["sft"]}
    step = {"event": "step", "stage": "sft", "steps": STEPS, "health": "ok", "learning_rate": 1e-4, "grad_norm": 1.0,
            "tokens_per_second": 24e3, "peak_memory_bytes": 4e10, "epoch": 1.0, "step_seconds": 1.0}  # fmt: skip
    events: list[dict[str, Any]] = [first]
    for number in range(1, STEPS + 1):
        loss = final_loss + 2.4 * math.exp(-number / 1500) + 0.1 * math.sin(number * 1.7)
        events.append({**step, "step": number, "loss": round(loss, 5)})
        if number % 1000 == 0:
            events.append({"event": "evaluation", "stage": "sft", "step": number, "eval_loss": round(loss, 5)})
    metrics = {"base_eval_loss": 4.0, "eval_loss": final_loss, "steps": STEPS, "tokens": 9_000_000, "seconds": 20_000.0}
    events.append({"event": "verdict", "stage": "sft", "open": True, "message": "", "metrics": metrics})
    write_journal(RunFolder(folder / name), [*events, {"event": "done", "seconds": 20_000.0}])


def sample_run(folder: Path) -> RunFolder:
    """A short run with everything that a report can show."""
    run = RunFolder(folder / "sample")
    first = {**SAMPLE[0], "run_format": RUN_FORMAT}
    write_journal(run, [first, *SAMPLE[1:-1], {"event": "stopped", "exit_code": 3, "message": "gate sft is closed"}])
    write_json(run.data_manifest("sft"), {"source": "rows.jsonl", "train": {"rows": 36, "tokens": 1856},
                                          "held_out": {"rows": 4}, "duplicate_rows": 18})  # fmt: skip
    names = ["aeroplane", "automobile", "bird"]
    write_json(run.demo_outputs / "mistakes.json", {"source": "images", "accuracy": 0.5, "classes": names,
                                                    "confusion": [[3, 1, 0], [2, 4, 9], [0, 0, 7]]})  # fmt: skip
    checks = [{"metric": "eval_loss", "value": 0.5, "requirement": "at most 1", "passed": True},
              {"metric": "answers.score", "value": 0.2, "requirement": "at least 0.8", "passed": False}]  # fmt: skip
    write_json(run.gate("sft"), {"open": False, "checks": checks, "metrics": {}})
    answers = [{"prompt": f"How far is {n} km?", "reference": "far", "answer": "far" if n else "near",
                "scores": {"score": float(n > 0)}} for n in range(3)]  # fmt: skip
    for model in ("base", "sft"):
        write_json(run.evaluation(model), {"answers": answers})
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as instance:
        yield instance


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, loss in LONG_RUNS.items():
        long_run(folder, name, loss)
    sample_run(folder)
    return folder


@pytest.fixture(scope="module")
def board(runs: Path) -> Iterator[str]:
    """The address of a board that has read its journals."""
    dashboard = Dashboard(RunIndex((), runs, {}), make_ask_handler())
    for tail in dashboard.index.runs().values():
        tail.poll()
    serving = LiveServer(dashboard.application)
    yield f"{serving.url}/{dashboard.token}/"
    serving.close()


def busyness() -> float:
    """How much longer than on an idle machine computing takes now, at least 1."""
    wall, work = time.perf_counter(), time.thread_time()
    while time.thread_time() - work < 0.1:
        pass
    return max(1.0, (time.perf_counter() - wall) / 0.1)


MEASURE = """async () => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  await painted();
  const start = performance.now();
  ACTION;
  await painted();
  return performance.now() - start;
}"""
"""Milliseconds from an action until the browser has drawn its result."""
HOVER = """{
  const svg = document.querySelector("svg[data-lines]"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: box.left + box.width * Math.random()}));
}"""
KEY = """document.querySelector("svg[data-lines]").dispatchEvent(
  new KeyboardEvent("keydown", {bubbles: true, cancelable: true, key: "ArrowRight"}))"""
FILTER = """{
  const filter = document.getElementById("filter");
  filter.value = filter.value ? "" : "lora";
  filter.dispatchEvent(new Event("input", {bubbles: true}));
}"""
SORT = """document.querySelectorAll("button.sort")[3].click()"""


def measure(window: Window, **actions: str) -> dict[str, float]:
    """The quickest of five tries of each action: the others are the machine's."""
    return {
        name: min(window.page.evaluate(MEASURE.replace("ACTION", action)) for _ in range(5))
        for name, action in actions.items()
    }


def load_ms(window: Window) -> float:
    """From asking the server until the page can be used: the quickest of three, since the first reads templates."""
    tries = []
    for _ in range(3):
        window.page.reload()
        tries.append(window.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    return float(min(tries))


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_three_long_runs_are_overlaid_and_answer_at_once(browser: Any, board: str, width: int, scheme: str) -> None:
    window, busy = Window(browser, width, scheme), busyness()
    page = window.page
    page.goto(board)
    times = {"list": load_ms(window), **measure(window, filter=FILTER, sort=SORT)}
    page.get_by_label("Filter runs").fill("")
    for name in page.locator("input[name=run]").all():
        name.set_checked(name.get_attribute("value") in LONG_RUNS)
    page.get_by_role("button", name="Compare 3 runs").press("Enter")
    page.get_by_role("heading", name="3 runs").wait_for()
    times |= {"overlay": load_ms(window), **measure(window, hover=HOVER, key=KEY)}
    figure = page.locator("figure.chart").first
    legend = [text.rsplit(" ", 1)[0] for text in figure.locator(".key").all_inner_texts()]
    assert sorted(legend) == sorted(LONG_RUNS), "each run is in the legend"
    assert figure.locator("path.line").count() == 3
    colours = {figure.locator(".key i").nth(n).evaluate("e => getComputedStyle(e).color") for n in range(3)}
    assert len(colours) == 3
    shown = page.locator(".tip").inner_text()
    assert all(name in shown for name in LONG_RUNS) and shown.startswith("step ")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scroll"
    tip = page.locator(".tip").bounding_box()
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= width, "the tooltip is on the screen"
    with page.expect_download() as download:
        figure.get_by_role("button", name="CSV").click()
    rows = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert sorted(rows[0].replace('"', "").split(",")) == sorted(["step", *LONG_RUNS]) and len(rows) > 200
    factor = max(busy, busyness())
    listed = ", ".join(f"{name} {ms:.0f}" for name, ms in times.items())
    print(f"\n{width} px, {scheme}: {listed} ms; the machine computes {factor:.1f} times slower than idle")
    # a pause between both looks at the machine must not fail it: 69 to 123 ms were seen on quiet cores
    assert max(times.values()) < 2 * LIMIT_MS * factor, times
    assert window.complaints == []
    assert all(address.startswith((board.rsplit("/", 2)[0], "blob:http://127.0.0.1")) for address in window.requests)
    page.close()


CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const context = canvas.getContext("2d", {willReadFrequently: true});
  const over = (colours) => {  // colours from the lowest layer to the highest, as the screen mixes them
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility({opacityProperty: true})) continue;
    if (["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const layers = [];
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) {
      layers.unshift(getComputedStyle(each).backgroundColor);
      opacity *= +getComputedStyle(each).opacity;
    }
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const values = [over(layers), over([...layers, style.color])].map(luminance).sort((a, b) => b - a);
    const ratio = (values[0] + 0.05) / (values[1] + 0.05);
    const large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
    count += 1;
    if (ratio < (large ? 3 : 4.5) || opacity < 1) found.push(`${node.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  for (const input of document.querySelectorAll("input[placeholder]")) {
    const paper = luminance(over([getComputedStyle(input).backgroundColor]));
    const ink = luminance(over([getComputedStyle(input, "::placeholder").color]));
    const [light, dark] = [paper, ink].sort((a, b) => b - a);
    if ((light + 0.05) / (dark + 0.05) < 4.5) found.push(`placeholder ${input.placeholder}`);
  }
  return [count, found];
}"""
"""How many texts a page has, and those whose contrast is below WCAG 2.2 AA."""
BROKEN_WORDS = """() => {
  const broken = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const match of node.data.matchAll(/[A-Za-z]{2,24}/g)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (tops.size > 1) broken.push(match[0]);
    }
  }
  return broken;
}"""
"""Words of letters that stand on two lines."""


def pages(board: str, runs: Path) -> dict[str, str]:
    marked = "&".join(f"run={name}" for name in [*LONG_RUNS, "sample"])
    return {
        "report": html.write_report(RunFolder(runs / "sample")).as_uri(),
        "list": board,
        "run": f"{board}run/sample/",
        "overlay": f"{board}overlay?{marked}",
    }


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_all_text_is_readable_and_no_word_breaks(browser: Any, board: str, runs: Path, width: int, scheme: str) -> None:
    window = Window(browser, width, scheme)
    for name, address in pages(board, runs).items():
        window.page.goto(address)
        window.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        count, faint = window.page.evaluate(CONTRAST)
        assert count > 15 and faint == [], f"{name}: contrast below AA"
        assert window.page.evaluate(BROKEN_WORDS) == [], f"{name}: words broken inside at {width} px"
        assert window.page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} scrolls sideways"
    assert window.complaints == []
    window.page.close()


def test_the_board_is_used_by_keyboard_alone(browser: Any, board: str) -> None:
    window = Window(browser, 1280)
    page = window.page
    page.goto(board)

    def tab_to(condition: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(f"(() => {{ const e = document.activeElement; return {condition}; }})()"):
                ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert ring != "none", "the focus is seen"
                return
        raise AssertionError(f"Tab never reached {condition}")

    tab_to("e.id === 'filter'")
    page.keyboard.type("finished")
    assert page.locator("table.runs tbody tr:not([hidden])").count() == 3
    for name in LONG_RUNS:
        box = page.locator(f"input[value={name}]")
        if not box.is_checked():
            tab_to(f"e.value === '{name}'")
            page.keyboard.press("Space")
            page.locator("#filter").focus()
    sample = page.locator("input[value=sample]")
    if sample.is_checked():  # the newest is marked at first; the filter hides it
        page.locator("#filter").fill("")
        tab_to("e.value === 'sample'")
        page.keyboard.press("Space")
    tab_to("e.id === 'compare'")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="3 runs").wait_for()
    tab_to("e.matches('svg[data-lines]')")
    page.keyboard.press("End")
    assert re.search(r"step 20,000", page.locator(".tip").inner_text())
    page.close()


def test_the_menu_leads_to_each_section_and_the_log_ends_with_the_newest_event(browser: Any, runs: Path) -> None:
    window = Window(browser, 1280)
    window.page.goto(html.write_report(RunFolder(runs / "sample")).as_uri())
    names = window.page.locator(".contents a").all_inner_texts()
    assert names == window.page.locator("section > h2:first-of-type").all_inner_texts()
    window.page.get_by_role("link", name="Last events").click()
    log = window.page.locator(".log")
    assert log.inner_text().splitlines()[-1].endswith("gate sft is closed")
    assert log.evaluate("e => e.scrollTop") == 0, "it is scrolled to its end"
    assert window.complaints == []
    window.page.close()
