"""The report is one small file that says what the run did; whatever a model or a row says in it stays text."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from modelwright.report import html
from modelwright.runs.folder import RUN_FORMAT, RunFolder, write_json
from modelwright.runs.journal import Journal
from tests.faults.hostile import HOSTILE
from tests.faults.security import ParsedPage


def run_folder(folder: Path, steps: int = 20, texts: list[str] | None = None, name: str = "tiny") -> RunFolder:
    """A run by its journal, a second per event, with these texts as question, answers, notes and source."""
    run = RunFolder(folder / "run")
    pairs = [{"question": text, "before": text, "after": text} for text in texts or ["Why?"]]
    question = pairs[0]["question"]
    step = {"event": "step", "stage": "sft", "steps": steps, "grad_norm": 1.0, "learning_rate": 1e-3, "health": "ok",
            "tokens_per_second": 100.0, "step_seconds": 1.0, "peak_memory_bytes": 10**9}  # fmt: skip
    events: list[dict[str, Any]] = [
        {"event": "run", "run_format": RUN_FORMAT, "recipe": name, "stages": ["sft"], "device": "2 CPU threads"},
        {"event": "stage_started", "stage": "sft"},
        *({**step, "step": number, "loss": 4 / number} for number in range(1, steps + 1)),
        {"event": "answers", "stage": "sft", "answers": pairs, "notice": question},
        *({"event": "note", "message": text} for text in texts or []),
        {"event": "verdict", "stage": "sft", "open": True, "message": question, "metrics": {"eval_loss": 1.0}},
        {"event": "done", "seconds": 1.0},
    ]
    run.path.mkdir(parents=True)
    lines = [json.dumps({"time": float(time), **event}) for time, event in enumerate(events)]
    run.journal.write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(run.data_manifest("sft"), {"source": question, "train": {"rows": 3}, "extra": question})
    checks = [{"metric": "eval_loss", "value": 1.0, "requirement": question, "passed": True}]
    write_json(run.gate("sft"), {"open": True, "checks": checks, "metrics": {"eval_loss": 1.0}})
    return run


def test_a_page_asks_the_network_for_nothing_and_opens_from_disk(tmp_path: Path) -> None:
    text = html.write_report(run_folder(tmp_path)).read_text(encoding="utf-8")
    page = ParsedPage(text)
    assert not set(page.tags) & {"link", "iframe", "object", "embed", "form", "base"}
    assert not [
        value
        for name, value in page.attributes
        if name in ("src", "href") and not str(value).startswith(("data:", "#"))
    ]
    [policy] = [value for name, value in page.attributes if name == "content" and "default-src" in str(value)]
    assert "default-src 'none'" in str(policy) and "connect-src 'none'" in str(policy)
    assert not re.search(r"https?://", text)


def test_a_gate_shows_each_metric_and_what_it_needs(tmp_path: Path) -> None:
    text = html.write_report(run_folder(tmp_path, texts=["at most 2"])).read_text(encoding="utf-8")
    assert re.search(r"<span>eval_loss</span>\s*<b>1</b> <small>\(needs at most 2\)</small>", text)


def test_a_bar_shows_where_the_time_went_in_seconds(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    spans = [("final model", 15.0, 40.0), ("answers", 7.0, 47.0)]
    lines = [json.dumps({"time": time, "event": "span", "stage": "sft", "name": name, "seconds": seconds})
             for name, seconds, time in spans]  # fmt: skip
    run.journal.write_text(run.journal.read_text(encoding="utf-8") + "\n".join(lines) + "\n", encoding="utf-8")
    page = ParsedPage(html.write_report(run).read_text(encoding="utf-8"))
    [bar] = [str(value) for name, value in page.attributes if name == "aria-label" and "Time breakdown" in str(value)]
    assert bar == "Time breakdown: startup 1 s; productive 20 s; final model 15 s; answers 7 s; gate 4 s"
    assert "final model 15 s · 32%" in " ".join(page.text.split())


def test_a_page_says_what_the_run_did(tmp_path: Path) -> None:
    text = ParsedPage(html.write_report(run_folder(tmp_path)).read_text(encoding="utf-8")).text
    for word in (
        "tiny",
        "finished",
        "20 of 20 steps",
        "open",
        "Why?",
        "Loss",
        "Gradient norm",
        "2 CPU threads",
        "1 GB",
    ):
        assert word in text, word


@pytest.mark.parametrize(("device", "shown"), [("NVIDIA H200", "predicted 3.56 MB → 1 GB"), ("2 CPU threads", "1 GB")])
def test_memory_is_predicted_where_the_same_memory_is_measured(tmp_path: Path, device: str, shown: str) -> None:
    run = run_folder(tmp_path)
    events = [json.loads(line) for line in run.journal.read_text(encoding="utf-8").splitlines()]
    plan = {"event": "plan", "stage": "sft", "time": 1.0, "device": device, "steps": 20}
    plan["prediction"] = {"memory": {"bytes": 3_562_869}}
    events.insert(2, plan)
    run.journal.write_text("\n".join(map(json.dumps, events)) + "\n", encoding="utf-8")
    text = html.write_report(run).read_text(encoding="utf-8")
    [cell] = re.findall(r"peak memory</th><td>(.*?)</td>", text)
    assert " ".join(cell.split()) == shown, "on a CPU the libraries are measured too"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_text_stays_text(tmp_path: Path, text: str) -> None:
    quiet = ParsedPage(html.write_report(run_folder(tmp_path / "quiet", texts=["Why?"])).read_text(encoding="utf-8"))
    folder = run_folder(tmp_path / "hostile", texts=[text], name=text)
    written = html.write_report(folder).read_text(encoding="utf-8")
    page = ParsedPage(written)
    assert page.tags == quiet.tags, "a text that makes a tag would make one more"
    assert {name for name, _ in page.attributes} == {name for name, _ in quiet.attributes}
    assert len(written) < 100_000
    assert not set("\x00\x1b\u202e\u2066\x07\x08") & set(written)


def test_a_run_that_has_only_begun_has_a_page_too(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    Journal(run.journal).add("run", run_format=RUN_FORMAT, recipe="x", folder="run", stages=["sft"])
    text = ParsedPage(html.write_report(run).read_text(encoding="utf-8")).text
    assert "running" in text and "not started" in text


def test_damaged_files_of_a_run_are_left_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    for path in (run.data_manifest("sft"), run.gate("sft"), run.plan, run.summary, run.recipe):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{ damaged", encoding="utf-8")
    assert "Why?" in html.write_report(run).read_text(encoding="utf-8")


def test_mistakes_of_an_image_classifier_are_shown_with_their_pictures(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    wrong = [{"row": 7, "truth": "cat", "answer": "dog", "confidence": 0.987}]
    result: dict[str, Any] = {"accuracy": 0.9, "classes": ["cat", "dog"], "confusion": [[8, 2], [0, 10]]}
    write_json(run.demo_outputs / "mistakes.json", {**result, "source": "pets", "surest_mistakes": wrong})
    (run.demo_outputs / "mistakes").mkdir()
    (run.demo_outputs / "mistakes" / "7.png").write_bytes(b"\x89PNG")
    read = ParsedPage(html.write_report(run).read_text(encoding="utf-8"))
    assert "Of pets." in read.text and "predicted dog, 98.7%" in read.text
    assert "90" not in read.text.partition("Of pets.")[2], "one accuracy, that of the evaluation"
    assert ("src", "data:image/png;base64,iVBORw==") in read.attributes


def test_a_journal_of_100_000_steps_becomes_a_small_page_in_seconds(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    facts = {"event": "step", "stage": "sft", "steps": 100_000, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-4}
    facts |= {
        "tokens_per_second": 9000.0,
        "peak_memory_bytes": 10**9,
        "health": "ok",
        "step_seconds": 0.1,
        "batch_hash": "0" * 16,
    }
    tail = json.dumps(facts)[1:]
    with run.journal.open("w", encoding="utf-8") as file:
        file.writelines(f'{{"time": {number}, "step": {number}, {tail}\n' for number in range(1, 100_001))
    began = time.process_time()
    size = html.write_report(run).stat().st_size
    assert time.process_time() - began < 60, "2 quiet CPU-seconds, with room for a slow machine"
    assert size < 200_000


def judged(prompt: str, answer: str, score: float) -> dict[str, Any]:
    return {"prompt": prompt, "reference": "42", "answer": answer, "scores": {"exact_match": score, "score": score}}


def test_judged_answers_are_a_table_with_the_wrong_ones_first(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    before = [
        judged("one?", "no", 0),
        judged("two?", "42", 1),
        judged("three?", HOSTILE[0], 0),
        judged("four?", "42", 1),
    ]
    after = [judged("one?", "42", 1), judged("two?", "42", 1), judged("three?", "41", 0), judged("four?", "no", 0.5)]
    write_json(run.evaluation("base"), {"answers": before})
    write_json(run.evaluation("sft"), {"answers": after})
    page = ParsedPage(html.write_report(run).read_text(encoding="utf-8"))
    assert "2 of 4 right → 2 of 4 right. Wrong answers first, then those that training changed." in page.text
    positions = [page.text.index(prompt) for prompt in ("four?", "three?", "one?", "two?")]
    assert positions == sorted(positions)
    assert page.text.count("✘ wrong") == 2 and page.text.count("expected: 42") == 2
    write_json(run.evaluation("base"), {"answers": before[:2]})  # of other prompts: only the model of the stage
    assert "2 of 4 right. Wrong" in ParsedPage(html.write_report(run).read_text(encoding="utf-8")).text
    write_json(run.evaluation("sft"), {"answers": [{"prompt": 1}, 7]})
    assert "Judged answers" not in html.write_report(run).read_text(encoding="utf-8")
