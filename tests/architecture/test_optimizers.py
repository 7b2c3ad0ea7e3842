"""An optimizer is an interface: its name and class stand in its own files and in one table, and nobody else asks.

A new optimizer is a class and a branch of `build_optimizer` in `engine/optimizer.py`, and a row of `OPTIMIZERS` in the
recipe.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from modelwright.engine.bf16_adamw import BF16AdamW
from modelwright.engine.optimizer import TrainerOptimizer, build_optimizer
from modelwright.recipe.stage_specs import OPTIMIZERS, OptimizerConfig, OptimizerName

SOURCE = Path(__file__).parents[2] / "src" / "modelwright"
OWN_FILES = {
    *("engine/optimizer.py", "engine/bf16_adamw.py", "engine/adamw_triton.py"),  # the optimizers
    "recipe/stage_specs.py",  # the table
}
FILES = sorted(file for file in SOURCE.rglob("*.py") if str(file.relative_to(SOURCE)) not in OWN_FILES)
NAMES = {name for ours, spec in OPTIMIZERS.items() for name in (ours, *spec.aliases, *spec.state)}
"""Words that only the files of an optimizer may hold: its names here and elsewhere, and the keys of its state."""
CLASSES = {kind.__name__ for kind in (*TrainerOptimizer.__subclasses__(), BF16AdamW)}


def optimizer_mentions(text: str) -> Iterator[str]:
    """Lines that name an optimizer, its class or its state, or compare `optim` with something."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Name | ast.Attribute | ast.alias):
            name = (
                node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else node.name
            )
            if name.rpartition(".")[2] in CLASSES:
                yield f"{node.lineno}: {name}"
        elif isinstance(node, ast.Compare | ast.Match):
            parts = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
            if any(isinstance(part, ast.Attribute) and part.attr == "optim" for part in parts):
                yield f"{node.lineno}: a question about optim"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_optimizer_is_named_outside_its_files(file: Path) -> None:
    problems = list(optimizer_mentions(file.read_text(encoding="utf-8")))
    assert not problems, "\n".join(f"{file.relative_to(SOURCE)}:{problem}" for problem in problems)


@pytest.mark.parametrize(
    "text",
    [
        'if settings.optim == "adamw_torch": ...',
        "if settings.optim in FUSED: ...",
        "match settings.optim:\n    case _: ...",
        "if isinstance(optimizer, BF16AdamW): ...",
        "from modelwright.engine.optimizer import FusedSGD",
        "import torch\noptimizer = torch.optim.FusedAdamW",
        'state["exp_avg"]',
        'BYTES = {"sgd": 4}',
    ],
)
def test_a_question_about_one_optimizer_is_noticed(text: str) -> None:
    assert list(optimizer_mentions(text))


def test_what_the_interface_offers_may_be_asked() -> None:
    text = '"""About adamw_torch."""\nif OPTIMIZERS[settings.optim].bf16_params:\n    optimizer.clip_grad_norm(1.0)'
    assert not list(optimizer_mentions(text))


def test_every_optimizer_of_the_recipe_has_a_row_and_a_class() -> None:
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)
    aliases = [alias for spec in OPTIMIZERS.values() for alias in spec.aliases]
    assert len({*aliases, *OPTIMIZERS}) == len(aliases) + len(OPTIMIZERS)
    params = {"matrix": nn.Parameter(torch.ones(4, 4)), "vector": nn.Parameter(torch.ones(4))}
    classes = set()
    for name, spec in OPTIMIZERS.items():
        optimizer = build_optimizer(params, OptimizerConfig(optim=name))
        for param in params.values():
            param.grad = torch.ones_like(param)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        state = {key: value for key, value in optimizer.state_tensors().items() if not key.endswith(".step")}
        assert {key.rpartition(".")[2] for key in state} == {*spec.state}
        state_bytes, _ = OptimizerConfig(optim=name).optimizer_bytes("fp32")
        assert sum(value.nbytes for value in state.values()) == state_bytes * sum(map(Tensor.numel, params.values()))
        assert {*spec.settings} <= {*OptimizerConfig.model_fields}
        assert all({*defaults} <= {*spec.settings} for defaults in spec.foreign_defaults.values())
        classes.add(type(optimizer))
    assert len(classes) == len(OPTIMIZERS)
