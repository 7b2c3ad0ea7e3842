"""What is done when a step cannot be computed as planned: smaller bites, a fresh compile cache, then no compiling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelwright.plan.stage import StagePlan, solve
from modelwright.runs.caches import drop_cut_libraries, fresh_compile_cache

SHAPES = 32
"""Ways one layer may be compiled: training and measuring, each for one row or many, of one length or any."""
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

    def __init__(self, parts: list[nn.Module], wanted: bool = True) -> None:
        _as_they_are(parts)
        self._parts, self._tries = parts if wanted else [], 0
        self.told = _mended_cache() if wanted else []
        """What had to be put right before."""
        if wanted:
            # what is compiled is kept by the code of a layer, not by the model: without this, later stages of a
            # process find the table full (8 shapes), and run as they are without a word
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = SHAPES
        for part in self._parts:
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
        _as_they_are(self._parts)
        self._parts = []
        return f"compiling failed again ({_first_line(error)}); the layers run as they are, slower and just as right"


def _as_they_are(parts: list[nn.Module]) -> None:
    for part in parts:
        part.__dict__["_compiled_call_impl"] = None


def _mended_cache() -> list[str]:
    """A library that was cut by a full disk or a kill would end the process without a word (SIGBUS)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    count = drop_cut_libraries(Path(cache_dir()))
    return [f"{count} libraries of the compile cache were cut short; they are compiled again"] if count else []


def _first_line(error: Any) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
