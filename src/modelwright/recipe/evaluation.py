"""What `evaluate` may say: the same measurements of every model of a run, so that its stages can be compared."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

from pydantic import Field, PositiveInt

from modelwright.recipe.values import Frozen

TEXT_METRICS = ("text_loss", "text_perplexity", "text_bits_per_byte")
CHOICE_METRICS = ("choice_accuracy", "choice_accuracy_norm")
TASK_METRICS = ("acc", "acc_norm", "exact_match", "f1", "perplexity", "word_perplexity", "bits_per_byte")

FILES = (".yaml", ".yml")
"""How the name of a task that is a file ends."""


class Evaluate(Frozen):
    """The model a run begins with and the model of every stage, measured in the same way."""

    text: str | None = None
    """Raw text (file, folder, embedded set or hub id) for loss and bits per byte; else what pretrain held out."""
    text_column: str = "text"
    """Column that holds the documents of the text."""
    multiple_choice: str | None = None
    """Questions with options and an answer, in any of the usual columns: a file, a folder or a hub id."""
    max_rows: PositiveInt = 200
    """Most documents and most questions that are measured."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest row of tokens; longer documents are measured in pieces."""
    prompts: list[str] = []
    """Beginnings that every model goes on with, shown side by side."""
    max_new_tokens: PositiveInt = 48
    """Longest continuation in tokens."""
    tasks: list[str] = []
    """Tasks of lm-eval, by name or as a file NAME.yaml of its form, where the eval extra is installed."""

    @property
    def asks(self) -> bool:
        """Whether anything is named to measure by."""
        return bool(self.text or self.multiple_choice or self.prompts or self.tasks)

    @property
    def measured(self) -> tuple[str, ...]:
        """What a gate may ask."""
        names = (PurePath(task).stem if task.endswith(FILES) else task for task in self.tasks)
        of_tasks = (f"{name}_{metric}" for name in names for metric in TASK_METRICS)
        return (*TEXT_METRICS, *(CHOICE_METRICS if self.multiple_choice else ()), *of_tasks)
