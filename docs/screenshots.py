"""Screenshots for the documentation: a run's report by this machine's browser, and its terminal output."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError
from modelwright.report import html
from modelwright.report.console import format_event
from modelwright.report.history import read_history
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder, open_run, read_json, write_json

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOTS = (
    ("report.png", 1100, 1500, "light"),
    ("report-dark.png", 1100, 1500, "dark"),
    ("phone.png", 390, 1100, "light"),
)
"""Name, width, height and colours of each picture."""
SOURCES = ("page.css", "charts.css", "page.js", "templates/page.html", "templates/sections.html")
"""Assets that decide how a report looks."""
SAMPLE: tuple[dict[str, Any], ...] = (
    {"event": "run", "recipe": "sample", "folder": "runs/sample", "stages": ["sft"], "device": "CPU", "world": 1},
    {"event": "model", "stage": "sft", "name": "tiny", "trainable_summary": "1 of 2 parameters train",
     "revision": None},
    {"event": "plan", "stage": "sft", "steps": 40, "batch_arithmetic": "batch 4 = 4 per device × 1",
     "precision": "fp32", "device": "cpu", "reasons": ["the batch is kept"],
     "prediction": {"tokens_per_second": 900.0}},
    {"event": "evaluation", "stage": "sft", "step": 0, "eval_loss": 4.0},
    *({"event": "step", "stage": "sft", "step": step, "steps": 40, "loss": 4.0 / step, "grad_norm": 1.0 + step % 3,
       "learning_rate": 1e-3 / step, "tokens_per_second": 900.0 + step, "peak_memory_bytes": 10**9, "step_seconds": 1.0,
       "eta_seconds": 40.0 - step, "health": "ok", "epoch": step / 20} for step in range(1, 41)),
    {"event": "checkpoint_saved", "stage": "sft", "step": 40, "seconds": 0.5},
    {"event": "evaluation", "stage": "sft", "step": 40, "eval_loss": 0.5},
    {"event": "answers", "stage": "sft", "notice": "A sample.", "answers": [
        {"question": "How far is it?", "before": "I do not know.", "after": "Ten kilometres."}]},
    {"event": "verdict", "stage": "sft", "open": True, "message": "gate sft is open: eval_loss 0.5 (needs at most 1)",
     "metrics": {"base_eval_loss": 4.0, "eval_loss": 0.5, "steps": 40, "tokens": 9000, "seconds": 41.0}},
    {"event": "note", "message": "a note"},
    {"event": "done", "folder": "runs/sample", "seconds": 50.0},
)  # fmt: skip
"""A fixed run: as long as its rendering is unchanged, the screenshots are valid."""


def take_screenshots(run: RunFolder) -> dict[str, Any]:
    """Take the screenshots of a run into docs/pictures, and save the hash of the rendering."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder_name:
        report = Path(folder_name) / "report.html"
        report.write_text(html.render_report(run, read_history(run)), encoding="utf-8")
        _capture(report, folder)
    (folder / "terminal.svg").write_text(_terminal(run), encoding="utf-8")
    summary = {
        "render_hash": render_hash(),
        "run": run.path.name,
        "bytes": {path.name: path.stat().st_size for path in _pictures(folder)},
    }
    write_json(folder / "pictures.json", summary)
    return summary


def render_hash() -> str:
    """A hash of the rendering: styles, templates, and the sample run on the page and in the terminal."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((html.ASSETS_DIR / name).read_bytes())
    with tempfile.TemporaryDirectory() as folder_name:
        run = RunFolder(Path(folder_name) / "sample")
        run.path.mkdir()
        lines = [json.dumps({"time": 1000.0 + number, **event}) for number, event in enumerate(SAMPLE)]
        run.journal.write_text("\n".join(lines) + "\n", encoding="utf-8")
        write_json(run.data_manifest("sft"), {"source": "rows.jsonl", "train": {"rows": 36}, "held_out": {"rows": 4}})
        write_json(run.demo_outputs / "mistakes.json", {"accuracy": 0.5, "classes": ["cat", "dog"],
                                                        "confusion": [[3, 1], [2, 4]]})  # fmt: skip
        page = "".join(html.render_sections(run, read_history(run)).values())
        terminal = "\n".join(_lines(run))
    digest.update((page + terminal).replace(folder_name, "").encode())
    return digest.hexdigest()


def is_stale() -> bool:
    """Whether the rendering has changed since the screenshots were taken."""
    path = _folder() / "pictures.json"
    return not path.exists() or read_json(path)["render_hash"] != render_hash()


def _capture(report: Path, folder: Path) -> None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise UsageError("pictures are made with a package that is not installed: pip install playwright") from None
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise UsageError("no browser was found; pictures are made with: apt-get install chromium fonts-inter")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for name, width, height, scheme in SHOTS:
            shown = opened.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            shown.goto(report.as_uri())
            shown.screenshot(path=folder / name)
            _shrink(folder / name)
        opened.close()


def _shrink(path: Path) -> None:
    """Reduce to 128 colours, since the repository keeps every version."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128)
    small.save(path, optimize=True)


def _terminal(run: RunFolder) -> str:
    """The run's lines as a terminal shows them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=110, file=io.StringIO())
    for line in _lines(run):
        console.print(Text(line[:108]))
    drawn = console.export_svg(title=f"modelwright run {run.path.name}", clear=False)
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # they would be fetched from elsewhere


def _lines(run: RunFolder) -> list[str]:
    """How a run begins and ends in a terminal."""
    from modelwright.report.console import run_summary

    name = f"runs/{run.path.name}"
    events = ({**event, "folder": name} for event in journal.read(run.journal))
    lines = [line for event in events if (line := format_event(event))]
    return [*lines[:16], "…", *run_summary(run).replace(str(run.path), name).splitlines()]


def _pictures(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.png"), *folder.glob("*.svg")])


def _folder() -> Path:
    return Path(__file__).resolve().parent / "pictures"


if __name__ == "__main__":
    for name, size in take_screenshots(open_run(sys.argv[1] if sys.argv[1:] else "runs/quickstart"))["bytes"].items():
        print(f"{size:>9,}  {name}")
