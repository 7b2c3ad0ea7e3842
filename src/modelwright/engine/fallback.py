"""Fallbacks for a step that does not compile: a fresh compile cache, then eager mode; dead compile workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils._pytree import tree_leaves

from modelwright.models import trainable
from modelwright.runs.caches import (
    remove_truncated_kernels,
    remove_truncated_libraries,
    triton_cache,
    truncated_at_start,
    use_empty_compile_cache,
)

RECOMPILE_LIMIT = 32
"""Compiled variants per layer: train and eval, one row or several, static or dynamic length."""
TOKENS_HINT = 8192
"""Tokens of a micro-batch that compiled kernels are made for where the number varies; any number runs."""
CHECKED_CACHES: set[Path] = set()
"""Compile caches this process has checked for truncated files."""
COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "triton")
CACHE_MODULES = (
    *("torch._inductor.codecache", "torch._inductor.async_compile"),
    *("triton.compiler", "triton.runtime.cache", "triton.runtime.build"),
)
"""Modules that read the caches and wait for workers; errors from there are not wrapped."""


def is_compiler_error(error: Exception) -> bool:
    """Whether the error comes from torch.compile or Triton, not from the step itself."""
    if any(type(each).__module__.startswith(COMPILER_MODULES) for each in (error, error.__cause__)):
        return True
    frames = walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(CACHE_MODULES) for frame, _ in frames)


class CompileCacheLogFilter(logging.Filter):
    """Replaces torch's traceback for each unreadable cache entry (it recompiles) with one message."""

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
    """The compiled layers of a module, and the fallback when compilation fails.

    varying_length: every micro-batch is one row [1, tokens, hidden] of another length.
    """

    def __init__(
        self, layers: list[nn.Module], log: Callable[[str], None], enabled: bool = True, deterministic: bool = True,
        varying_length: bool = False,
    ) -> None:  # fmt: skip
        _uncompile(layers)
        self._layers, self._failures = layers if enabled else [], 0
        if torch.cuda.is_available():  # our own Triton kernels are cached there too
            _drop_truncated(triton_cache(), log)
        if enabled:
            from torch._inductor import config as inductor_config

            _check_compile_caches(log)
            # compiled code is cached per code object, not per model: without a reset, later stages of a process
            # hit the recompile limit (8) and run eagerly without a message
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            torch.compiler.config.cache_key_tag = _custom_op_hash()
            # otherwise reductions are split, and matmuls padded, as was fastest in this process
            inductor_config.deterministic = deterministic
            detect_dead_compile_workers()
        for layer in self._layers:
            layer.compile()
            if varying_length:
                compiled: Any = layer._compiled_call_impl
                layer.__dict__["_compiled_call_impl"] = partial(_call_dynamic, compiled)

    def fallback_for(self, error: Exception) -> str | None:
        """First retry with a fresh compile cache, then run eagerly; describes what was done."""
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


def _call_dynamic(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled layer whose kernels do not depend on the length that it was first called with.

    By default torch compiles the first length alone, then makes kernels for any with the second in mind: a resumed run
    sees other lengths first, and would split its reductions otherwise.
    """
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() in (2, 3) and tensor.shape[1] > 1:
            torch._dynamo.mark_dynamic(tensor, 1, hint_override=TOKENS_HINT)
    return compiled(*args, **kwargs)


@cache
def _custom_op_hash() -> str:
    """Hash of our custom ops: the compile cache keys them by name only."""
    return f"modelwright {xxhash.xxh3_64_hexdigest(Path(trainable.__file__).read_bytes())}"


def _uncompile(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer.__dict__["_compiled_call_impl"] = None


def _check_compile_caches(log: Callable[[str], None]) -> None:
    """Remove truncated files from inductor's cache and install the log filter."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _drop_truncated(Path(cache_dir()), log)
    logger = logging.getLogger("torch._inductor.codecache")
    logger.filters = [log_filter for log_filter in logger.filters if not isinstance(log_filter, CompileCacheLogFilter)]
    logger.addFilter(CompileCacheLogFilter(log))


def _drop_truncated(folder: Path, log: Callable[[str], None]) -> None:
    """Once per process: loading a library truncated by a full disk or a kill would end it with SIGBUS."""
    count = truncated_at_start()
    if folder not in CHECKED_CACHES:
        CHECKED_CACHES.add(folder)
        count += remove_truncated_libraries(folder) + remove_truncated_kernels(folder)
    if count:
        log(f"{count} truncated files removed from the compile cache")


def _error_summary(error: Any) -> str:
    """The first line of an error that says what happened."""
    head, *following = (str(error).strip() or type(error).__name__).splitlines()
    return (following[0] if following and head.endswith(":") else head)[:160]


def detect_dead_compile_workers() -> None:
    """Start inductor's worker processes and make torch notice when they die."""
    if not torch.cuda.is_available():  # CPU compilation uses threads of this process
        return
    with suppress(Exception):  # private API: in another torch version it may be missing
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads, shutdown_compile_workers

        if config.worker_start_method != "subprocess" or get_compile_threads() < 2:
            return
        pool: Any = AsyncCompile.process_pool()
        if not pool.running:
            if timer := getattr(pool, "timer", None):  # its timer would write to dead workers and print errors
                timer.quit()
            shutdown_compile_workers()
            pool = AsyncCompile.process_pool()
        close_worker_pipes(pool)


def close_worker_pipes(pool: Any) -> None:
    """Close the workers' ends of the pipes in this process: while torch holds them open, it never reads EOF."""
    worker_fds = [int(arg.split("=")[1]) for arg in pool.process.args if "-fd=" in arg]
    own_pipes = {_file_id(pipe.fileno()) for pipe in (pool.read_pipe, pool.write_pipe)}
    for fd in worker_fds:
        with suppress(OSError):  # closed already, by us or by torch
            if _file_id(fd) in own_pipes:  # both ends of a pipe share an inode; the fd may have been reused
                os.close(fd)


def _file_id(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
