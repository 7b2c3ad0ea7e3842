"""Whole commands, from the start of `modelwright run` to its exit: how long, and where the seconds went.

    python -m benchmarks.whole_commands                        sft and survival, with empty, then with warm caches
    python -m benchmarks.whole_commands --only llama --runs 1 --keep DIR --set pretrain.max_steps=700
    python -m benchmarks.whole_commands --only sft --set sft.torch_compile=true
    python -m benchmarks.whole_commands --device cpu           tries the command with tiny models

sft: 40 steps of a model of Qwen3-0.6B's shape by default settings, rows as in `benchmarks.mixed_lengths`. survival: the
recipe survival-smollm3 on its rows (MODELWRIGHT_SHARED) with a model of SmolLM3-3B's shape. llama: all seven stages of
llama-7b at an eighth of its width on the text (every .txt and .jsonl file in web-text), instructions and pairs at hand,
closed gates accepted; --keep copies its report and summary. Weights are random; models and rows are written before the
clock starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.common import Progress
from benchmarks.mixed_lengths import (
    MAX_LENGTH,
    SHAPES,
    Case,
    Work,
    row_texts,
    save_number_tokenizer,
    save_recipe,
    shared_data,
)
from benchmarks.tables import markdown_table
from benchmarks.workloads import random_model, train_tokenizer
from modelwright.data.sources import python_docs
from modelwright.errors import UsageError
from modelwright.plan.model_shape import SHIPPED_CONFIGS
from modelwright.report.history import TimeBreakdown
from modelwright.runs import journal

Figures = dict[str, Any]
STEPS = {"cuda": 40, "cpu": 4}
SURVIVAL_ROWS = "practical-skills-qa/final_qa_data_unique.jsonl"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def sft_command(folder: Path, device: str) -> list[str]:
    """Write model, rows and recipe of the short fine-tune; the arguments of `modelwright run`."""
    shape = "qwen3-0.6b" if device == "cuda" else "tiny"
    _save_model(folder, *SHAPES[shape], save_number_tokenizer(folder), device)
    texts = row_texts(None if device == "cuda" else 200, 1 if device == "cuda" else 8)
    work = Work(Case(shape), STEPS[device], 0, device, folder, texts)
    return [str(save_recipe(work, {"max_steps": STEPS[device], "max_length": MAX_LENGTH}))]


def survival_command(folder: Path, device: str) -> list[str]:
    """Write model and rows of the survival recipe; the arguments of `modelwright run`."""
    tokenizer = train_tokenizer(folder, _shared_text(SURVIVAL_ROWS).splitlines())
    config = dict(SHIPPED_CONFIGS["smollm3-3b"]) if device == "cuda" else {**SHAPES["tiny"][1], "vocab_size": 8192}
    model_type = config.pop("model_type", "smollm3")
    _save_model(folder, model_type, config, tokenizer, device)
    rows = (shared_data() / SURVIVAL_ROWS).absolute()
    sets = {"model.model_name_or_path": folder, "data.dataset_name": rows, "gates": "{}"}
    if device == "cpu":
        sets |= {"sft.max_steps": STEPS[device], "compare.num_held_out_prompts": 1, "data.test_size": 8}
    return ["survival-smollm3", *_set([f"{key}={value}" for key, value in sets.items()])]


WIDTH = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 4, "num_key_value_heads": 1}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
TINY_STAGE = {"max_steps": 3, "max_length": 512, "warmup_steps": 1, "eval_steps": 3, "save_steps": 3}
STAGES = ("pretrain", "sft", "dpo", "lora")
CLOSED = "random weights and little text: to train the later stages too"


def llama_command(folder: Path, device: str) -> list[str]:
    """Write the data of llama-7b beside the folder; the arguments of `modelwright run`, started there."""
    files = [*sorted(_shared_path("web-text").iterdir()), _shared_path("tinyshakespeare/input.txt")]
    documents = [text for file in files for text in _documents(file)]
    documents += [text for _, text in python_docs()] if device == "cuda" else []
    instructions, pairs = (
        json.loads(_shared_text(f"rasbt-instruct/instruction-data{name}.json")) for name in ("", "-with-preference")
    )
    rows = {
        "raw": [{"text": text} for text in documents],
        "sft": [{"prompt": _prompt(row), "completion": row["output"]} for row in instructions],
        "dpo": [{"prompt": _prompt(row), "chosen": row["chosen"], "rejected": row["rejected"]} for row in pairs],
        "domain": [
            {"prompt": f"For {row['topic']}, {row['question']}", "completion": row["answer"]}
            for row in map(json.loads, _shared_text(SURVIVAL_ROWS).splitlines())
        ],
    }
    for name, content in rows.items():
        (folder.parent / "data" / name).mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder.parent / "data" / name / "rows.jsonl").write_text(lines, encoding="utf-8")
    sets: dict[str, Any] = {
        f"model.architecture.{name}": size for name, size in (WIDTH if device == "cuda" else TINY).items()
    }
    sets["pretrain.data.test_size"] = "1%"  # of the recipe's 0.1%, no row is left here
    if device == "cpu":
        sets |= {"prepare.vocab_size": 512, "prepare.sequence_length": 512, "pretrain.sequence_length_curriculum": "{}"}
        sets |= {f"{stage}.{name}": value for stage in STAGES for name, value in TINY_STAGE.items()}
    accepted = [word for stage in STAGES for word in ("--accept-gate", stage)]
    return ["llama-7b", *_set([f"{key}={value}" for key, value in sets.items()]), *accepted, "--reason", CLOSED]


def _documents(file: Path) -> list[str]:
    """The documents of a file: its rows, or what three line breaks separate."""
    text = file.read_text(encoding="utf-8")
    return [json.loads(line)["text"] for line in text.splitlines()] if file.suffix == ".jsonl" else text.split("\n\n\n")


def _prompt(row: dict[str, str]) -> str:
    return "\n".join(filter(None, (row["instruction"], row["input"])))


def _shared_path(name: str) -> Path:
    if not (path := shared_data() / name).exists():
        raise UsageError(f"{path} does not exist; MODELWRIGHT_SHARED wants the folder that holds data/{name}")
    return path


def _shared_text(name: str) -> str:
    return _shared_path(name).read_text(encoding="utf-8")


COMMANDS: dict[str, Callable[[Path, str], list[str]]] = {
    "sft": sft_command, "survival": survival_command, "llama": llama_command,
}  # fmt: skip
DEFAULT_COMMANDS = ("sft", "survival")
STARTS = ("empty caches", "warm caches")


def _save_model(folder: Path, model_type: str, shape: dict[str, Any], tokenizer: Any, device: str) -> None:
    """Random weights in bf16, as models are published."""
    import torch

    random_model(model_type, shape, device, tokenizer, torch.bfloat16).to("cpu").save_pretrained(folder)


def measure(
    names: Sequence[str], sets: Sequence[str], device: str, runs: int = len(STARTS), keep: Path | None = None
) -> Figures:
    """Each command so many times, each time with a new run folder; `keep` gets the last report and summary."""
    figures: Figures = {"device": device, "set": list(sets), "commands": {}}
    for name in names:
        progress = Progress(name)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model").mkdir()
            arguments = COMMANDS[name](Path(folder) / "model", device)
            progress.log("model and rows are written")
            figures["commands"][name] = starts = {}
            for start in STARTS[:runs]:
                output = Path(folder) / start.split()[0]
                starts[start] = run_command([*arguments, *_set(sets)], output, Path(folder) / "caches")
                progress.log(f"{start}: {starts[start]}")
                if keep is not None and "failed" not in starts[start]:
                    (keep / name).mkdir(parents=True, exist_ok=True)
                    for file in ("report.html", "training_summary.json"):
                        shutil.copy(output / file, keep / name)
    return figures


def _set(sets: Sequence[str]) -> list[str]:
    return [word for setting in sets for word in ("--set", setting)]


def run_command(arguments: Sequence[str], output: Path, caches: Path) -> Figures:
    """Wall time of one `modelwright run` and its parts by the journal; what comes before and after it counts too."""
    caches.mkdir(exist_ok=True)
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables = [f"PYTHONPATH={os.pathsep.join(paths)}", *(f"{name}={caches / name}" for name in CACHES)]
    command = ["env", *variables, sys.executable, "-m", "modelwright", "run"]  # in another folder than this process
    command += [*arguments, "--set", f"output_dir={output.name}"]
    began, clock = time.perf_counter(), time.time()
    done = subprocess.run(command, capture_output=True, text=True, cwd=output.parent, check=False)
    seconds, ended = time.perf_counter() - began, time.time()
    if done.returncode not in (0, 3):
        return {"failed": f"exit {done.returncode}: {done.stderr.strip()[-800:]}"}
    events = list(journal.read(output / "journal.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    breakdown = TimeBreakdown()
    for event in events:
        breakdown.add(event)
    parts = {category: round(value, 1) for category, value in breakdown.seconds.items() if value >= 0.05}
    return {
        "wall_seconds": round(seconds, 1),
        "first_step": round(steps[0]["time"] - clock, 1),
        "steps": len(steps),
        "parts": parts,
        "after_the_last_event": round(ended - events[-1]["time"], 1),
    }


def lines(figures: Figures) -> Iterator[str]:
    """A row for each command, and its parts."""
    rows = []
    for name, runs in figures["commands"].items():
        for start, run in runs.items():
            parts = ", ".join(
                f"{part.replace('_', ' ')} {seconds:.1f}" for part, seconds in run.get("parts", {}).items()
            )
            cells = [run.get(key, "–") for key in ("wall_seconds", "first_step", "steps", "after_the_last_event")]
            rows.append([name, start, *(str(cell) for cell in cells), run.get("failed") or parts])
    yield markdown_table(("command", "start", "s", "first step", "steps", "s after the last event", "s of parts"), rows)


def main(
    only: Annotated[list[str] | None, typer.Option("--only", help=f"{', '.join(COMMANDS)}; repeatable.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="A setting of the recipe: KEY=VALUE.")] = None,
    runs: Annotated[int, typer.Option(help="1: with empty compile caches only.", min=1, max=len(STARTS))] = 2,
    keep: Annotated[Path | None, typer.Option(help="Copy report and summary into a folder here.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: tiny models, to try the command.")] = "",
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Wall time of whole commands and of their parts."""
    import torch

    if unknown := [name for name in only or () if name not in COMMANDS]:
        raise UsageError(f"--only is {unknown[0]!r}; it wants one of {', '.join(COMMANDS)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = only or DEFAULT_COMMANDS
    common.report("whole-commands", lambda: measure(names, sets or (), device, runs, keep), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
