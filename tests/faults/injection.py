"""Texts that would do harm where text is not kept as text, said by models, rows, recipes and names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from modelwright.report import html
from modelwright.runs.folder import RunFolder, write_json
from tests.faults.hostile_doors import Runner, write_recipe
from tests.faults.hostile_texts import HOSTILE

ACTS = "\x00\x07\x08\x1b\x9b\u202e\u2066"
"""What a terminal or a reader acts upon."""


class Tags(HTMLParser):
    """Every tag and attribute of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@dataclass
class Said:
    """What came of the texts."""

    pages: int = 0
    """Pages that were drawn with one."""
    streams: int = 0
    """Outputs of commands that met some."""
    acted: list[str] = field(default_factory=list)
    """Where one was more than text."""


def run_that_says(folder: Path, text: str, steps: int = 20) -> RunFolder:
    """A run as its journal tells it, with a text as its name, question, answers, notes, source and verdict."""
    run = RunFolder(folder / "run")
    step = {"event": "step", "stage": "sft", "steps": steps, "grad_norm": 1.0, "learning_rate": 1e-3, "health": "ok",
            "tokens_per_second": 100.0, "step_seconds": 1.0, "peak_memory_bytes": 10**9}  # fmt: skip
    answers = [{"question": text, "before": text, "after": text}]
    events: list[dict[str, Any]] = [
        {"event": "run", "recipe": text, "stages": ["sft"], "world": 1, "device": text},
        {"event": "stage_started", "stage": "sft"},
        *({**step, "step": number, "loss": 4 / number} for number in range(1, steps + 1)),
        {"event": "answers", "stage": "sft", "answers": answers, "notice": text},
        {"event": "note", "message": text},
        {"event": "verdict", "stage": "sft", "open": True, "message": text, "metrics": {"eval_loss": 1.0}},
        {"event": "done", "seconds": 1.0},
    ]
    run.path.mkdir(parents=True)
    lines = [json.dumps({"time": float(time), **event}) for time, event in enumerate(events)]
    run.journal.write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(run.data_manifest("sft"), {"source": text, "train": {"rows": 3}, "extra": text})
    checks = [{"metric": "eval_loss", "value": 1.0, "requirement": text, "passed": True}]
    write_json(run.gate("sft"), {"open": True, "checks": checks, "metrics": {"eval_loss": 1.0}})
    return run


def pages(folder: Path, said: Said, texts: Sequence[str] = HOSTILE) -> None:
    """Draw a report for each text, and compare its tags with those of a run that says "Why?"."""
    plain = Tags(html.write_report(run_that_says(folder / "plain", "Why?")).read_text(encoding="utf-8"))
    for number, text in enumerate(texts):
        written = html.write_report(run_that_says(folder / f"page-{number}", text)).read_text(encoding="utf-8")
        found = Tags(written)
        said.pages += 1
        if found.tags != plain.tags or {name for name, _ in found.attributes} != {name for name, _ in plain.attributes}:
            said.acted.append(f"report: {text[:60]!r} makes tags or attributes")
        said.acted += [f"report: {text[:60]!r} leaves {mark!r}" for mark in ACTS if mark in written]


def streams(folder: Path, model: Path, run: Runner, said: Said) -> None:
    """Let every verb that quotes recipes and rows meet the texts, its output going to a file: nothing may act there."""
    for words in _verbs(folder, model):
        _, printed = run(words, folder)
        said.streams += 1
        said.acted += [f"{' '.join(words[:2])} prints {mark!r}" for mark in ACTS if mark in printed]


def _verbs(folder: Path, model: Path) -> Iterator[Sequence[str]]:
    mark = "\x1b]0;title\x07\x1b[2J\u202e"
    recipe = write_recipe(folder / "recipe.yaml", model, {"train_file": "rows.jsonl"})
    said = json.loads(recipe.read_text("utf-8"))
    said["data"]["system_prompt"] = mark
    recipe.write_text(
        json.dumps({**said, "description": mark, "compare": {"prompts": [mark], "max_new_tokens": 1}}), "utf-8"
    )
    for verb in ("check", "explain", "plan", "run"):
        yield verb, str(recipe)
    for verb in ("report", "compare", "gate"):
        yield verb, str(folder / "run")
    yield "ask", str(folder / "run"), mark
    wrong = folder / "wrong.yaml"
    wrong.write_text(json.dumps({**said, mark: mark, "sft": {"precision": mark, "max_steps": mark}}), "utf-8")
    for verb in ("check", "explain", "run"):
        yield verb, str(wrong)
    rows = folder / "hostile.jsonl"
    rows.write_text(
        "".join(json.dumps({mark: mark, "prompt": value}) + "\n" for value in (mark, 7, "")) + mark, "utf-8"
    )
    yield "data", "audit", str(rows)
    recipe.write_text(json.dumps({**said, "data": {"train_file": str(rows)}}), "utf-8")
    for words in (("data", "audit"), ("data", "show"), ("run",)):
        yield *words, str(recipe)
    yield "run", f"{mark}.yaml"
    yield "run", str(recipe), "--set", f"{mark}={mark}"
    yield "report", mark
