"""How a result is shown and judged: questions answered before and after, and what a metric must be."""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from modelwright.recipe.values import Frozen, Regex


class Compare(Frozen):
    """The same questions answered before and after."""

    prompts: list[str] = []
    """Questions asked every time."""
    held_out_prompts: NonNegativeInt = 0
    """So many held-out questions asked as well."""
    max_new_tokens: PositiveInt = 128
    """Longest answer in tokens."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token each time, so that answers can be compared."""
    style: list[Regex] = []
    """Regular expressions of the voice; style_score is the mean share of them found in an answer."""


class Threshold(Frozen):
    """What a metric must be."""

    at_most: float | None = None
    """The metric may not be higher."""
    at_least: float | None = None
    """The metric may not be lower."""
    times: str | None = None
    """Name of another metric that the limits are multiples of, such as base_eval_loss."""
    plus: str | None = None
    """Name of another metric that the limits are added to, such as parent_eval_loss: no worse than it by so much."""

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise PydanticCustomError("some_limit", "has no limit; it wants at_most or at_least")
        if self.times is not None and self.plus is not None:
            raise PydanticCustomError("one_yardstick", "has both times and plus; it wants one of them")
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            limits = {"least": self.at_least, "most": self.at_most}
            found = "has at_least {least} above at_most {most}; nothing could pass"
            raise PydanticCustomError("empty_range", found, limits)
        return self
