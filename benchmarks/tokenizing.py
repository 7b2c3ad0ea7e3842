"""Seconds from a file of rows to token ids with a loss mask, at the first start of a fine-tune and at the next one.

    python -m benchmarks.tokenizing                20,000 rows of English text, TRL's SFTTrainer beside it
    python -m benchmarks.tokenizing --rows 200000 --no-peer

Rows have the lengths of real questions and answers. Each start is a process of its own; imports and the model are not
counted, reading the rows is. Both sides begin with empty caches."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.mixed_lengths import MAX_LENGTH, row_texts
from modelwright.data.sources import python_docs
from modelwright.models import pretrained

Figures = dict[str, Any]
STARTS = ("first", "next")
WORDS_A_TOKEN = 0.6
SEED = 1
RECIPE = """\
name: tokenizing
model: {{model_name_or_path: smollm2-135m-instruct}}
data: {{train_file: {rows}, test_size: 4}}
sft: {{max_length: {max_length}}}
"""


def write_rows(path: Path, count: int) -> None:
    """Questions and answers of real lengths, each another part of Python's documentation."""
    words, rng = " ".join(text for _, text in python_docs()).split(), random.Random(SEED)
    lengths = [[len(text.split()) for text in texts[:2]] for texts in row_texts(None)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row: dict[str, str] = {}
            for name, tokens in zip(("prompt", "completion"), lengths[number % len(lengths)], strict=True):
                start = rng.randrange(len(words) - MAX_LENGTH)
                row[name] = " ".join(words[start : start + max(1, round(tokens * WORDS_A_TOKEN))])
            file.write(json.dumps(row) + "\n")


def tokenize_ours(rows: Path) -> Figures:
    """As a run does before it loads weights."""
    from modelwright.data.chat import load_conversations
    from modelwright.data.chat_tokens import tokenize_conversations
    from modelwright.recipe.load import load

    recipe_file = rows.with_name("recipe.yaml")
    recipe_file.write_text(RECIPE.format(rows=rows, max_length=MAX_LENGTH))
    recipe = load(str(recipe_file), environ={}).recipe
    tokenizer = pretrained.load_tokenizer(pretrained.embedded_model())
    assert recipe.sft is not None
    began = time.perf_counter()
    data = load_conversations(recipe.data_for("sft"), recipe.seed, rows.parent)
    dataset = tokenize_conversations(data.train, tokenizer, recipe.sft, cache_key=data.cache_key("train"))
    return {"seconds": round(time.perf_counter() - began, 2), "rows": len(dataset.rows)}


def tokenize_trl(rows: Path) -> Figures:
    """SFTTrainer's preparation of the same rows as messages, with a model of one small layer."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(pretrained.embedded_model())
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    options = {"output_dir": str(rows.parent / "trl"), "report_to": "none", "use_cpu": True, "bf16": False}
    began = time.perf_counter()
    dataset = load_dataset("json", data_files=str(rows), split="train").map(as_messages)
    config = SFTConfig(max_length=MAX_LENGTH, **options)
    trainer = SFTTrainer(model, config, train_dataset=dataset, processing_class=tokenizer)
    return {"seconds": round(time.perf_counter() - began, 2), "rows": len(trainer.train_dataset)}


def as_messages(row: dict[str, str]) -> dict[str, Any]:
    """A row in TRL's conversational form."""
    roles = {"prompt": "user", "completion": "assistant"}
    return {name: [{"role": role, "content": row[name]}] for name, role in roles.items()}


SIDES = {"modelwright": tokenize_ours, "trl": tokenize_trl}


def measure(count: int, peer: bool) -> Figures:
    """Two starts of each side."""
    sides = [name for name in SIDES if name == "modelwright" or (peer and common.installed("trl"))]
    figures: Figures = {"rows": count}
    pretrained.embedded_model()
    with tempfile.TemporaryDirectory() as folder:
        rows, cache = Path(folder) / "rows.jsonl", Path(folder) / "cache"
        write_rows(rows, count)
        cache.mkdir()
        (cache / pretrained.embedded_model().name).symlink_to(pretrained.embedded_model())
        environment = {**os.environ, "MODELWRIGHT_CACHE": str(cache), "HF_HOME": str(Path(folder) / "hf")}
        for side in sides:
            figures[side] = {}
            for start in STARTS:
                command = [sys.executable, "-m", "benchmarks.tokenizing", "--side", side, str(rows)]
                done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
                if done.returncode:
                    figures[side][start] = {"failed": done.stderr.strip().splitlines()[-1]}
                    continue
                figures[side][start] = json.loads(done.stdout.splitlines()[-1])
    return figures


def lines(figures: Figures) -> Iterator[str]:
    """A line for each side."""
    for side in SIDES:
        if side in figures:
            starts = (
                f"{start} start {run.get('failed') or str(run['seconds']) + ' s'}"
                for start, run in figures[side].items()
            )
            yield f"{side}, {figures['rows']:,} rows: {', '.join(starts)}"


def main(
    path: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    side: Annotated[str, typer.Option(hidden=True)] = "",
    rows: Annotated[int, typer.Option(help="Rows of the file.", min=1)] = 20_000,
    peer: Annotated[bool, typer.Option(help="TRL beside it.")] = True,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """First and next start of a fine-tune, from its rows to their tokens."""
    if path is not None:
        print(json.dumps(SIDES[side](path)))
        return
    common.report("tokenizing", lambda: measure(rows, peer), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
