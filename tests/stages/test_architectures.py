"""A whole run of an unusual model: what is special about it is said, and what it cannot do is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from modelwright.errors import ModelError
from modelwright.recipe.load import load
from modelwright.stages import pipeline
from tests.faults.fork_server import events_of
from tiny import tiny_recipe
from zoo import build


def test_what_is_unusual_about_a_model_and_its_rows_is_said(tmp_path: Path) -> None:
    """GPT-OSS has no SDPA and a router; its rows open with a turn of the assistant."""
    build("gpt_oss", tmp_path / "model")
    recipe = tiny_recipe(tmp_path, tmp_path / "model", max_steps=2, eval_steps=2, save_steps=2, max_length=128)
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(re.sub(r"  columns: .*\n", "", text), encoding="utf-8")
    turns = [{"role": "assistant", "content": "Ask me."}, {"role": "user", "content": "Why?"},
             {"role": "assistant", "content": "So."}]  # fmt: skip
    rows = [json.dumps({"messages": [*turns[:1], {**turns[1], "content": f"Why {n}?"}, turns[2]]}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    folder = pipeline.run(load(recipe, environ={}))
    notes = [note["message"] for note in events_of(folder.path, "note")]
    assert "this family has no SDPA: attention runs eager (attn_implementation)" in notes
    assert "8 rows open with a turn of the assistant, which has no prompt and is not trained" in notes
    evaluation = events_of(folder.path, "evaluation")[-1]
    assert evaluation["eval_loss"] > 0.001 * evaluation["eval_router_aux_loss"] > 0
    packed = tiny_recipe(tmp_path / "packed", tmp_path / "model", packing=True, max_steps=1)
    with pytest.raises(ModelError, match="packed rows depend on each other in this family; use packing: false"):
        pipeline.run(load(packed, environ={}))


def test_dynamic_rope_is_refused_for_rows_that_would_change_it_and_longrope_is_noted(tmp_path: Path) -> None:
    """Both take other frequencies for all rows of a batch once one of them is long; a dynamic one keeps them."""
    build("llama", tmp_path / "dynamic", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
          max_position_embeddings=32)  # fmt: skip
    recipe = tiny_recipe(tmp_path / "a", tmp_path / "dynamic", max_steps=1)
    with pytest.raises(ModelError, match="it wants max_length of at most 32, and it is 64"):
        pipeline.run(load(recipe, environ={}))
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 32}  # fmt: skip
    build("phi3", tmp_path / "long", rope_parameters=rope, original_max_position_embeddings=32)
    folder = pipeline.run(load(tiny_recipe(tmp_path / "b", tmp_path / "long", max_steps=1), environ={}))
    assert any(note["message"].startswith("longrope: ") for note in events_of(folder.path, "note"))
