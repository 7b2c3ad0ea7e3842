"""Every architecture gives what the plain model of transformers gives, or is refused before training.

``NIGHTLY=1 UPDATE_GOLDEN=1 pytest tests/models/test_zoo.py`` runs all and rewrites docs/reference/architectures.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from modelwright.errors import ModelError
from zoo import ARCHITECTURES, COLUMNS, QUICK, Zoo, cells

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
NIGHTLY = bool(os.environ.get("NIGHTLY"))
HEAD = """\
# Architectures

<!-- Made by tests/models/test_zoo.py. To regenerate it (ten minutes):
     NIGHTLY=1 UPDATE_GOLDEN=1 pytest tests/models/test_zoo.py -->

Tiny random models of {count} architectures of transformers {version} were compared with the plain model in eager
attention, one row at a time: losses, gradients, log-probs, logits and answers. Equal for all of them: {always}. The
columns of the table below are equal too for these:

{full}

For the others: **yes**: equal. **off**: the saving is not used, and the results are equal. **no**: refused before
training, with a message that says what would work.

- *packed*: SFT with `packing: true`
- *shared prefix*: `share_prefix`
- *frozen cache*: `cache_frozen_layers` with `trainable: {{last_layers: 1}}`
- *LoRA*: `lora_target_modules: all-linear`; *export*: its merged model

"""
DESCRIPTIONS = {
    "padded": "SFT of padded rows",
    "DPO": "DPO",
    "reload": "the saved model",
    "ask": "answers of `ask`, streamed and in a batch",
}
"""The columns in which every architecture has yes."""


def as_page(results: dict[str, dict[str, str]]) -> str:
    """What works with every architecture: a list of those with which all does, a table of the others."""
    import transformers

    words = {"equal": "yes", "equal, prompt twice": "yes", "off": "off", "refused": "**no**"}
    table = {
        name: {column: words.get(row[column].partition(":")[0], row[column]) for column in COLUMNS}
        for name, row in results.items()
    }
    return page_of(table, transformers.__version__)


def page_of(table: dict[str, dict[str, str]], version: str) -> str:
    """The page for a table of yes, off and no."""
    always = [column for column in COLUMNS if all(row[column] == "yes" for row in table.values())]
    columns = [column for column in COLUMNS if column not in always]
    full: dict[str, list[str]] = {}
    lines = [f"| architecture | kind | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, row in table.items():
        if set(row.values()) == {"yes"}:
            full.setdefault(ARCHITECTURES[name], []).append(name)
        else:
            lines.append(f"| {name} | {ARCHITECTURES[name]} | {' | '.join(row[column] for column in columns)} |")
    kinds = "\n".join(f"- {kind}: {', '.join(names)}" for kind, names in full.items())
    described = ", ".join(DESCRIPTIONS[column] for column in always)
    return HEAD.format(count=len(table), version=version, always=described, full=kinds) + "\n".join(lines) + "\n"


def wrong_cells(results: dict[str, str]) -> dict[str, str]:
    return {column: value for column, value in results.items() if value.startswith("WRONG")}


@pytest.mark.parametrize("name", QUICK)
def test_an_architecture_gives_what_the_plain_model_gives(name: str, tmp_path: Path) -> None:
    results = cells(name, tmp_path)
    assert not wrong_cells(results)
    assert results["padded"] == results["reload"] == results["ask"] == "equal"


@pytest.mark.slow
def test_a_decoder_that_counts_its_own_positions_shares_no_prefix(tmp_path: Path) -> None:
    """BART's ignores position ids: in a tiny one log-probs were 6e-4 off, and a probe allowed 2e-2."""
    zoo = Zoo("bart", tmp_path)  # twelve layers, behind which positions hardly show
    assert zoo.shared_prefix() == "off"
    assert zoo.dpo() == "equal, prompt twice"


@pytest.mark.slow
def test_documents_in_one_block_of_a_compressed_attention_are_not_packed(tmp_path: Path) -> None:
    """DeepSeek-V4 compresses 128 tokens to one key; a probe of 24 tokens did not see that documents share it."""
    zoo = Zoo("deepseek_v4", tmp_path, layer_types=["heavily_compressed_attention"] * 2)
    assert zoo.padded() == "equal"
    with pytest.raises(ModelError, match="packed rows depend on each other in this family"):
        zoo.packed()


@pytest.mark.skipif(not NIGHTLY, reason="takes ten minutes; NIGHTLY=1 runs it")
@pytest.mark.timeout(3600)
def test_no_architecture_is_silently_wrong(tmp_path: Path) -> None:
    results = {name: cells(name, tmp_path / name) for name in ARCHITECTURES}
    wrong = {name: cell for name, row in results.items() if (cell := wrong_cells(row))}
    assert not wrong
    assert len(results) >= 40
    assert sum(row["padded"] == "equal" for row in results.values()) >= 0.9 * len(results)
    text = as_page(results)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def test_the_page_has_every_architecture_and_no_wrong_cell() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "WRONG" not in text
    named = set(re.findall(r"^\| ([\w-]+) \|", text, re.MULTILINE)) - {"architecture"}
    for line in re.findall(r"^- [\w ,]+: ([\w, -]+)$", text, re.MULTILINE):
        named |= set(line.split(", "))
    assert named == set(ARCHITECTURES)
