"""A new user with one file: from check to a training step in a fresh clone, in fourteen formats, with one edit each."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

ROOT = Path(__file__).parents[2]
TOPICS = [f"well number {number}" for number in range(12)]
QUESTIONS = [(f"Where is the {topic}?", f"Behind barn {number}.") for number, topic in enumerate(TOPICS)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def table(separator: str) -> bytes:
    return "\n".join(separator.join(row) for row in [("Question", "Answer"), *QUESTIONS]).encode()


def arrow(is_parquet: bool) -> bytes:
    table = pyarrow.table({"question": [q for q, _ in QUESTIONS], "answer": [a for _, a in QUESTIONS]})
    sink = io.BytesIO()
    if is_parquet:
        pyarrow.parquet.write_table(table, sink)
        return sink.getvalue()
    with pyarrow.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return sink.getvalue()


def call(topic: str, answer: str) -> dict[str, Any]:
    """A row with tools: the call, the output of the tool and the answer."""
    function = {"name": "find", "arguments": json.dumps({"what": topic})}
    turns = [{"role": "user", "content": f"Where is the {topic}?"},
             {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
             {"role": "tool", "content": answer}, {"role": "assistant", "content": answer}]  # fmt: skip
    parameters = {"type": "object", "properties": {"what": {"type": "string"}}}
    return {"messages": turns, "tools": [{"type": "function", "function": {"name": "find", "parameters": parameters}}]}


INFO = {"wells": {"file_name": "asked.json", "columns": {"prompt": "ask", "response": "reply"}}}
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMATS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "openai.jsonl": ("sft", lambda: lines([{"messages": messages(*each)} for each in QUESTIONS])),
    "parts.jsonl": ("sft", lambda: lines([
        {"messages": [{"role": "user", "content": [{"type": "text", "text": q}]}, {"role": "assistant", "content": a}]}
        for q, a in QUESTIONS])),
    "sharegpt.json": ("sft", lambda: json.dumps([
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in QUESTIONS]).encode()),
    "alpaca.json": ("sft", lambda: json.dumps([
        {"instruction": q, "input": "", "output": a} for q, a in QUESTIONS]).encode()),
    "table.csv": ("sft", lambda: table(",")),
    "table.tsv": ("sft", lambda: table("\t")),
    "query.jsonl.gz": ("sft", lambda: gzip.compress(lines([{"query": q, "response": a} for q, a in QUESTIONS]))),
    "triples.jsonl": ("dpo", lambda: lines([{"prompt": q, "chosen": a, "rejected": "No idea."} for q, a in QUESTIONS])),
    "transcripts.jsonl": ("dpo", lambda: lines([
        {"chosen": f"\n\nHuman: {q}\n\nAssistant: {a}", "rejected": f"\n\nHuman: {q}\n\nAssistant: No."}
        for q, a in QUESTIONS])),
    "table.parquet": ("sft", lambda: arrow(True)),
    "table.arrow": ("sft", lambda: arrow(False)),
    "tools.jsonl": ("sft", lambda: lines([
        call(topic, answer) for topic, (_, answer) in zip(TOPICS, QUESTIONS, strict=True)])),
    "dataset_info.json": ("sft", lambda: json.dumps(INFO).encode()),
    "marked.jsonl": ("sft", lambda: lines([
        {"messages": [*messages(q, "Hm."), *messages("Sure?", a)], "id": q} for q, a in QUESTIONS])),
}  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is committed, without anything that is only in this folder."""
    folder = tmp_path_factory.mktemp("clone") / "modelwright"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="takes three minutes; NIGHTLY=1 runs it")
@pytest.mark.parametrize("name", FORMATS)
def test_one_file_gets_from_check_to_a_training_step_with_one_edit(
    name: str, clone: Path, model_folder: Path, tmp_path: Path
) -> None:
    stage, content = FORMATS[name]
    (tmp_path / name).write_bytes(content())
    data = f"train_file: {name}"
    if name == "dataset_info.json":
        rows = [{"ask": question, "reply": answer} for question, answer in QUESTIONS]
        (tmp_path / "asked.json").write_text(json.dumps(rows), encoding="utf-8")
        data = "dataset_name: ., dataset_config_name: wells"
    if name == "tools.jsonl":  # a model whose template knows tools
        model_folder = shutil.copytree(model_folder, tmp_path / "model")
        (model_folder / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: mine\nmodel: {{model_name_or_path: {model_folder}}}\ndata: {{{data}}}\n"  # the one edit
        f"{stage}: {{max_steps: 1, max_length: 256}}\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(clone / "src"), "OMP_NUM_THREADS": "1"}
    for command in ("check", "run"):
        done = subprocess.run(
            [sys.executable, "-m", "modelwright", command, "recipe.yaml"], cwd=tmp_path, env=environment,
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "read as" in done.stdout, done.stdout
    assert f"{stage} step 1/1" in done.stdout
