"""What a run learns on: text or images. Each knows its ingredients, how to build a stage of them and how to show it.

Everything else, from the loop to the gate, is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from modelwright.engine.loop import Engine
from modelwright.engine.task import Task
from modelwright.models.trainable import Share
from modelwright.plan.stage import StagePlan
from modelwright.stages.context import Context
from modelwright.stages.lineage import Parent

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Ingredients:
    """What a stage works with."""

    model: Any
    """Where the model comes from that the stage starts from."""
    model_name: str
    """What it is called."""
    revision: str | None
    """The hub commit it is pinned to, where it has one."""
    data: Any
    """What it learns from and is measured by."""
    model_fingerprint: str
    """Changes when the model does."""
    data_fingerprint: str
    """Changes when the data does."""
    load_model: Callable[..., Any] | None = None
    """Makes a language model in place of `text.load_model`: with random weights, where steps are only measured."""


@dataclass(frozen=True)
class Built:
    """A stage ready to be trained."""

    task: Task
    """What the engine is given."""
    model: nn.Module
    """What is saved in the end."""
    share: Share
    """How much of it moves."""
    flops_per_token: float
    """Operations for one token (or image), forward and backward."""
    data_facts: dict[str, Any]
    """What the model sees, for the data manifest."""
    save: Callable[[dict[str, Tensor], Path], None]
    """Writes whole weights into a model folder."""
    planned: Callable[[int], None] = lambda steps: None
    """Told how many steps there will be, before the first one."""
    savings: Callable[[StagePlan], tuple[str, ...]] = lambda plan: ()
    """What need not be computed twice under a plan, a line each."""
    settle: Callable[[Engine, Path], str | None] = lambda engine, folder: None
    """Computes, before the first step, what no step changes; it may use a folder, and tells in a line what it did."""


class Kind(Protocol):
    """Text or images."""

    shown: frozenset[str]
    """Metrics that only `show` measures."""

    def gather(self, context: Context, stage: str, parent: Parent | None) -> Ingredients:
        """Find the model, which is the parent's where there is one, and read the data."""

    def build(self, context: Context, found: Ingredients, stage: str) -> Built:
        """Make the task of a stage."""

    def show(self, context: Context, found: Ingredients, stage: str) -> Metrics:
        """Write what a person looks at into demo_outputs, and return its metrics."""
