"""No code asks which training stage it has: it asks the spec of the stage (`recipe/stage_specs.py`).

A new stage would otherwise need a branch in every such place. Looked for are comparisons with the name of a stage,
dict literals and subscripts with one as key, `recipe.NAME`, and `isinstance` of the settings of one stage.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelwright.recipe.stage_specs import STAGES

SOURCE = Path(__file__).parents[2] / "src" / "modelwright"
EXEMPT = {"recipe/stage_specs.py", "recipe/schema.py", "stages/specs.py", "data/row_formats.py"}
"""The tables of stages themselves, the fields of `Recipe`, and the row formats."""
FILES = [
    file
    for file in sorted(SOURCE.rglob("*.py"))
    if str(file.relative_to(SOURCE)) not in EXEMPT and file.parent.name != "tasks"
]
CONFIGS = {spec.config.__name__ for spec in STAGES.values()}
NAMES = set(STAGES) - {"lora"}
"""`lora` is also a value of `trainable`, and so only looked for beside a name with `stage` in it."""


def stage_questions(text: str) -> list[str]:
    """Every place that asks for one stage, with its line."""
    return [f"{node.lineno}: {ast.unparse(node)[:80]}" for node in ast.walk(ast.parse(text)) if _asks_for_stage(node)]


def _asks_for_stage(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        names = set(STAGES) if any("stage" in ast.unparse(each) for each in operands) else NAMES
        return any(literal in names for each in operands for literal in _strings(each))
    if isinstance(node, ast.Dict):
        return any(literal in NAMES for key in node.keys if key for literal in _strings(key))
    if isinstance(node, ast.Subscript):
        return any(literal in NAMES for literal in _strings(node.slice))
    if isinstance(node, ast.Attribute):
        return node.attr in STAGES and ast.unparse(node.value).split(".")[-1] == "recipe"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
        return any(isinstance(each, ast.Name) and each.id in CONFIGS for each in ast.walk(node))
    return False


def _strings(node: ast.expr) -> Iterator[object]:
    """A literal, or the literals of a tuple, list or set."""
    for each in node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]:
        if isinstance(each, ast.Constant):
            yield each.value


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_asks_which_stage_it_is(file: Path) -> None:
    assert not stage_questions(file.read_text(encoding="utf-8")), "ask STAGES[name] or settings.spec"


@pytest.mark.parametrize(
    "line",
    [
        'stage == "dpo"',
        '"classify" not in recipe.stages',
        'stage in ("sft", "lora")',
        'conversion.stage == "lora"',
        'readers = {"sft": read, "dpo": read_pairs}',
        'metrics["pretrain"]',
        "loaded.recipe.pretrain",
        "isinstance(settings, DpoConfig)",
        "isinstance(settings, SftConfig | DpoConfig)",
    ],
)
def test_such_a_question_is_noticed(line: str) -> None:
    assert stage_questions(line)


@pytest.mark.parametrize(
    "line",
    ['trainable == "lora"', 'PlanCase("DPO", stage="dpo")', "isinstance(settings, PairConfig)", 'stage == "prepare"'],
)
def test_values_and_mixins_are_no_such_question(line: str) -> None:
    assert not stage_questions(line)
