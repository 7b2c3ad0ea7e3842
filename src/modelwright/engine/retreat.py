"""What is done when a step cannot be computed as planned: smaller bites, a fresh compile cache, then no compiling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from modelwright.plan.stage import StagePlan, solve
from modelwright.runs.caches import fresh_compile_cache

COMPILERS = ("torch._dynamo", "torch._inductor", "triton")


def smaller_bites(plan: StagePlan) -> StagePlan | None:
    """The same batch with half the rows at once; None where a row at once is already the least."""
    if plan.per_device == 1:
        return None
    per_device, accumulation = solve(plan.global_batch, plan.per_device // 2, plan.world)
    return replace(plan, per_device=per_device, accumulation=accumulation)


def is_compilers(error: Exception) -> bool:
    """Whether it is the compiler that failed, and not the work."""
    kinds = [type(link).__module__ for link in (error, error.__cause__) if link is not None]
    return any(kind.startswith(COMPILERS) for kind in kinds)


class Compiled:
    """The parts of a module that are compiled, and how to go on where that fails."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts, self._tries = parts, 0
        for part in parts:
            part.compile()

    def retreat(self, error: Exception) -> str | None:
        """Once with a cache of its own, for the old one may be broken; then as the modules are. Tells what is done."""
        if not self._parts or not is_compilers(error):
            return None
        self._tries += 1
        torch._dynamo.reset()
        if self._tries == 1:
            fresh_compile_cache()
            return f"compiling failed ({_first_line(error)}); it is tried again with a fresh cache"
        for part in self._parts:
            part.__dict__["_compiled_call_impl"] = None
        self._parts = []
        return f"compiling failed again ({_first_line(error)}); the layers run as they are, slower and just as right"


def _first_line(error: Any) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
