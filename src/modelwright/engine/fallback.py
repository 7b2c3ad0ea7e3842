"""Fallbacks when a step fails: a smaller micro-batch on out-of-memory, a fresh compile cache, then eager mode; dead compile workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import xxhash
from torch import nn

from modelwright.models import trainable
from modelwright.plan.stage import StagePlan, solve_batch
from modelwright.runs.caches import (
    remove_truncated_kernels,
    remove_truncated_libraries,
    triton_cache,
    truncated_at_start,
    use_empty_compile_cache,
)

RECOMPILE_LIMIT = 32
"""Ways one layer may be compiled: training and measuring, each for one row or many, of one length or any."""
CHECKED_CACHES: set[Path] = set()
"""Compile caches that this process has looked after."""
COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "triton")
CACHE_MODULES = ("torch._inductor.codecache", "torch._inductor.async_compile", "triton.compiler", "triton.runtime.cache",
             "triton.runtime.build")  # fmt: skip
"""Where they read what they have kept, and wait for it; what they meet there comes out as it is."""


def halve_micro_batch(plan: StagePlan) -> StagePlan | None:
    """The same batch with half the rows at once; None where a row at once is already the least."""
    if plan.micro_batch_size == 1:
        return None
    micro_batch_size, accumulation_steps = solve_batch(
        plan.global_batch_size, plan.micro_batch_size // 2, plan.world_size
    )
    return replace(plan, micro_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation_steps)


def is_compiler_error(error: Exception) -> bool:
    """Whether it is the compiler that failed, and not the work."""
    error_modules = [type(exception).__module__ for exception in (error, error.__cause__) if exception is not None]
    frame_modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(name.startswith(COMPILER_MODULES) for name in error_modules) or any(
        module.startswith(CACHE_MODULES) for module in frame_modules
    )


class CompileCacheLogFilter(logging.Filter):
    """Graphs of the compile cache that cannot be read: torch compiles them again, and tells each by a traceback."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__()
        self._log, self._logged = log, False

    def filter(self, record: logging.LogRecord) -> bool:
        if "unable to load" not in str(record.msg):
            return True
        if not self._logged:
            self._log("the compile cache cannot be read; compiling again")
        self._logged = True
        return False


class CompiledLayers:
    """The parts of a module that are compiled, and how to go on where that fails."""

    def __init__(self, layers: list[nn.Module], log: Callable[[str], None], enabled: bool = True) -> None:
        """`say` is told what had to be put right."""
        _uncompile(layers)
        self._layers, self._failures = layers if enabled else [], 0
        if torch.cuda.is_available():  # where kernels of our own are kept too
            _drop_truncated(triton_cache(), log)
        if enabled:
            _check_compile_caches(log)
            # what is compiled is kept by the code of a layer, not by the model: without this, later stages of a
            # process find the table full (8 shapes), and run as they are without a word
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            torch.compiler.config.cache_key_tag = _custom_op_hash()
            detect_dead_compile_workers()
        for layer in self._layers:
            layer.compile()

    def fallback_for(self, error: Exception) -> str | None:
        """Once with a cache of its own, for the old one may be broken; then as the modules are. Tells what is done."""
        if not is_compiler_error(error) or (self._failures and not self._layers):
            return None
        self._failures += 1
        torch._dynamo.reset()
        if self._failures == 1:
            use_empty_compile_cache()
            detect_dead_compile_workers()
            return f"torch.compile failed ({_error_summary(error)}); retrying with a fresh cache"
        _uncompile(self._layers)
        self._layers = []
        return f"torch.compile failed again ({_error_summary(error)}); running eagerly: slower, same results"


@cache
def _custom_op_hash() -> str:
    """What our own operations do: the compiler keeps what it made of them by their names alone."""
    return f"modelwright {xxhash.xxh3_64_hexdigest(Path(trainable.__file__).read_bytes())}"


def _uncompile(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer.__dict__["_compiled_call_impl"] = None


def _check_compile_caches(log: Callable[[str], None]) -> None:
    """Look after what torch has compiled, and tell of it in our words."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _drop_truncated(Path(cache_dir()), log)
    logger = logging.getLogger("torch._inductor.codecache")
    logger.filters = [log_filter for log_filter in logger.filters if not isinstance(log_filter, CompileCacheLogFilter)]
    logger.addFilter(CompileCacheLogFilter(log))


def _drop_truncated(folder: Path, log: Callable[[str], None]) -> None:
    """Once in a process: a library that was cut by a full disk or a kill would end it without a word (SIGBUS)."""
    count = truncated_at_start()
    if folder not in CHECKED_CACHES:
        CHECKED_CACHES.add(folder)
        count += remove_truncated_libraries(folder) + remove_truncated_kernels(folder)
    if count:
        log(f"{count} truncated files removed from the compile cache")


def _error_summary(error: Any) -> str:
    """What happened, without the line that only says who met it."""
    head, *following = (str(error).strip() or type(error).__name__).splitlines()
    return (following[0] if following and head.endswith(":") else head)[:160]


def detect_dead_compile_workers() -> None:
    """Have them started, where a GPU is compiled for in parallel, so that torch learns when they are gone."""
    if not torch.cuda.is_available():  # what is compiled for the CPU waits for threads of this process
        return
    with suppress(Exception):  # without them or their names in another torch, work goes on as torch has it
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads, shutdown_compile_workers

        if config.worker_start_method != "subprocess" or get_compile_threads() < 2:
            return
        pool: Any = AsyncCompile.process_pool()
        if not pool.running:
            if timer := getattr(pool, "timer", None):  # it would speak to them again, and be heard on the screen
                timer.quit()
            shutdown_compile_workers()
            pool = AsyncCompile.process_pool()
        close_worker_pipes(pool)


def close_worker_pipes(pool: Any) -> None:
    """Close the workers' ends of the pipes in this process: torch keeps them, and so never reads that they are gone."""
    worker_fds = [int(arg.split("=")[1]) for arg in pool.process.args if "-fd=" in arg]
    own_pipes = {_file_id(pipe.fileno()) for pipe in (pool.read_pipe, pool.write_pipe)}
    for fd in worker_fds:
        with suppress(OSError):  # closed already: by us, or by a torch that does so itself
            if _file_id(fd) in own_pipes:  # both ends of a pipe are one file; its number may belong to another by now
                os.close(fd)


def _file_id(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
