"""A plan is read-only, revised in one place; a task has no optional members that only a getattr would find."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import StagePlan, plan_stage
from modelwright.recipe.stage_specs import SftConfig

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])

PLAN_FIELDS = {field.name for field in fields(StagePlan)}


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def plan_changes(text: str) -> list[int]:
    """Lines that replace fields of a plan, or store another plan in an attribute."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "plan")
        or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("replace", "dataclasses.replace")
            and ("plan" in ast.unparse(node.args[0]) or any(word.arg in PLAN_FIELDS for word in node.keywords))
        )
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_plan_is_changed_by_its_own_revise_only(file: Path) -> None:
    lines = plan_changes(file.read_text(encoding="utf-8"))
    assert len(lines) == (file.parts[-2:] == ("plan", "stage.py")), f"{file.relative_to(ROOT)}: {lines}"


@pytest.mark.parametrize(
    "code",
    [
        "self.plan = smaller",
        "previous, engine.plan = engine.plan, smaller",
        "replace(self.plan, steps=3)",
        "dataclasses.replace(chosen, micro_batch_size=1)",
    ],
)
def test_another_change_of_a_plan_would_be_found(code: str) -> None:
    assert set(plan_changes(f"import dataclasses\n{code}")) == {2}
    assert not plan_changes("plan = self.plan.revise(reason, steps=3); text.replace('plan', ''); replace(case, rows=2)")


def test_a_plan_cannot_be_written_to() -> None:
    plan = plan_stage(SftConfig(), 100, 1, DeviceInfo("cpu", "CPU", 10**9, False))
    with pytest.raises(FrozenInstanceError):
        plan.micro_batch_size = 1  # type: ignore[misc]
    revised = plan.revise("a reason", micro_batch_size=2)
    assert revised.reasons == (*plan.reasons, "a reason") and plan.micro_batch_size == 8
    assert "micro_batch_size" in revised.changes_from(plan)


def hidden_hooks(text: str) -> list[int]:
    """Lines that ask a task for something its protocol may not have."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and name_of(node.func) in ("getattr", "hasattr")
        and name_of(node.args[0]) == "task"
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_task_protocol_says_all_that_is_asked_of_a_task(file: Path) -> None:
    assert not hidden_hooks(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("code", ["getattr(task, 'rows', 0)", "x = hasattr(self.engine.task, 'warm_up')"])
def test_a_hidden_hook_would_be_found(code: str) -> None:
    assert hidden_hooks(f"import os\n{code}") == [2]
    assert not hidden_hooks("getattr(tasks, 'sft'); task.rows")
