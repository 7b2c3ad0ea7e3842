"""What is done when a step cannot be computed as planned: smaller bites, a fresh compile cache, then no compiling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import xxhash
from torch import nn

from modelwright.engine import compilers
from modelwright.models import low_rank
from modelwright.plan.stage import StagePlan, solve
from modelwright.runs.caches import (
    cut_at_start,
    drop_cut_kernels,
    drop_cut_libraries,
    fresh_compile_cache,
    triton_cache,
)

SHAPES = 32
"""Ways one layer may be compiled: training and measuring, each for one row or many, of one length or any."""
MENDED: set[Path] = set()
"""Compile caches that this process has looked after."""
COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
COMPILING = ("torch._inductor.codecache", "torch._inductor.async_compile", "triton.compiler", "triton.runtime.cache",
             "triton.runtime.build")  # fmt: skip
"""Where they read what they have kept, and wait for it; what they meet there comes out as it is."""


def smaller_bites(plan: StagePlan) -> StagePlan | None:
    """The same batch with half the rows at once; None where a row at once is already the least."""
    if plan.per_device == 1:
        return None
    per_device, accumulation = solve(plan.global_batch, plan.per_device // 2, plan.world)
    return replace(plan, per_device=per_device, accumulation=accumulation)


def is_compilers(error: Exception) -> bool:
    """Whether it is the compiler that failed, and not the work."""
    kinds = [type(link).__module__ for link in (error, error.__cause__) if link is not None]
    places = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(kind.startswith(COMPILERS) for kind in kinds) or any(place.startswith(COMPILING) for place in places)


class Unread(logging.Filter):
    """Graphs of the compile cache that cannot be read: torch compiles them again, and tells each by a traceback."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._said = say, False

    def filter(self, record: logging.LogRecord) -> bool:
        if "unable to load" not in str(record.msg):
            return True
        if not self._said:
            self._say("what the compile cache holds cannot be read; it is compiled again")
        self._said = True
        return False


class Compiled:
    """The parts of a module that are compiled, and how to go on where that fails."""

    def __init__(self, parts: list[nn.Module], say: Callable[[str], None], wanted: bool = True) -> None:
        """`say` is told what had to be put right."""
        _as_they_are(parts)
        self._parts, self._tries = parts if wanted else [], 0
        if torch.cuda.is_available():  # where kernels of our own are kept too
            _mend(triton_cache(), say)
        if wanted:
            _mend_caches(say)
            # what is compiled is kept by the code of a layer, not by the model: without this, later stages of a
            # process find the table full (8 shapes), and run as they are without a word
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = SHAPES
            torch.compiler.config.cache_key_tag = _operations()
            compilers.hear_their_end()
        for part in self._parts:
            part.compile()

    def retreat(self, error: Exception) -> str | None:
        """Once with a cache of its own, for the old one may be broken; then as the modules are. Tells what is done."""
        if not is_compilers(error) or (self._tries and not self._parts):
            return None
        self._tries += 1
        torch._dynamo.reset()
        if self._tries == 1:
            fresh_compile_cache()
            compilers.hear_their_end()
            return f"compiling failed ({_what_happened(error)}); it is tried again with a fresh cache"
        _as_they_are(self._parts)
        self._parts = []
        return f"compiling failed again ({_what_happened(error)}); the layers run as they are, slower and just as right"


@cache
def _operations() -> str:
    """What our own operations do: the compiler keeps what it made of them by their names alone."""
    return f"modelwright {xxhash.xxh3_64_hexdigest(Path(low_rank.__file__).read_bytes())}"


def _as_they_are(parts: list[nn.Module]) -> None:
    for part in parts:
        part.__dict__["_compiled_call_impl"] = None


def _mend_caches(say: Callable[[str], None]) -> None:
    """Look after what torch has compiled, and tell of it in our words."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _mend(Path(cache_dir()), say)
    reader = logging.getLogger("torch._inductor.codecache")
    reader.filters = [kept for kept in reader.filters if not isinstance(kept, Unread)]
    reader.addFilter(Unread(say))


def _mend(folder: Path, say: Callable[[str], None]) -> None:
    """Once in a process: a library that was cut by a full disk or a kill would end it without a word (SIGBUS)."""
    count = cut_at_start()
    if folder not in MENDED:
        MENDED.add(folder)
        count += drop_cut_libraries(folder) + drop_cut_kernels(folder)
    if count:
        say(f"{count} libraries and kernels of the compile caches were cut short; they are compiled again")


def _what_happened(error: Any) -> str:
    """What happened, without the line that only says who met it."""
    head, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return (rest[0] if rest and head.endswith(":") else head)[:160]
