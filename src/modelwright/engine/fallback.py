"""Fallbacks for a step that does not compile: a fresh compile cache, then eager mode; dead compile workers."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
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
MAX_HEAD_DIM = 256
"""Numbers that a compiled kernel sums at once, in registers."""
MAX_CHECKED_KINDS = 8
"""Kinds of layers, such as with a sliding window and without, whose gradients are compared with the eager ones."""
MAX_GRADIENT_GAP = 0.25
"""Rounding in bf16 makes 0.03; a wrong kernel made 0.5 and more."""
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
    """The compiled layers of a module, and the fallback when compilation fails."""

    def __init__(
        self, layers: list[nn.Module], log: Callable[[str], None], enabled: bool = True, deterministic: bool = True
    ) -> None:
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
            torch.compiler.config.cache_key_tag = _code_hash()
            # otherwise reductions are split, and matmuls padded, as was fastest in this process
            inductor_config.deterministic = deterministic
            _reduce_heads_in_registers()
            detect_dead_compile_workers()
        for layer in self._layers:
            layer.compile()

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

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run the layers uncompiled inside: compiling them for a few evaluations takes longer than it saves.

        18 s before the first step of a 3 B model, 6 s of Gemma 3 270M (H200, 2026-11-18).
        """
        compiled = [layer.__dict__["_compiled_call_impl"] for layer in self._layers]
        _uncompile(self._layers)
        try:
            yield
        finally:
            for layer, call in zip(self._layers, compiled, strict=False):  # none are left after a failure
                layer.__dict__["_compiled_call_impl"] = call

    @contextmanager
    def mark_varying_sizes(self, runs: Sequence[Callable[[], object]], context: Callable[[], Any]) -> Iterator[None]:
        """Compile for any size, inside, where the inputs of a layer have another one in each of `runs`.

        Otherwise torch compiles for the sizes of the first call, and for any size at the second: twice the time.
        """
        kinds = self._kinds()
        layers = self._layers if kinds else []
        recorded = [self._record_calls(kinds.values(), run, context) for run in runs if kinds]
        dims = {kind: _varying_dims([calls.get(layer) for calls in recorded]) for kind, layer in kinds.items()}
        recorded.clear()  # hidden states
        compiled = [layer.__dict__["_compiled_call_impl"] for layer in layers]
        for layer, call in zip(layers, compiled, strict=True):
            if call is not None:
                layer.__dict__["_compiled_call_impl"] = partial(_call_marked, call, dims[_layer_kind(layer)])
        try:
            yield
        finally:
            for layer, call in zip(layers, compiled, strict=True):
                layer.__dict__["_compiled_call_impl"] = call

    def _kinds(self) -> dict[tuple[Any, ...], nn.Module]:
        """The first layer of each kind, the last kind first; none with FSDP."""
        layers = [] if any(isinstance(layer, FSDPModule) for layer in self._layers) else self._layers
        return {_layer_kind(layer): layer for layer in reversed(layers)}

    def _record_calls(
        self, layers: Iterable[nn.Module], run: Callable[[], object], context: Callable[[], Any]
    ) -> dict[nn.Module, tuple[Any, Any]]:
        """The first arguments of each layer in an eager forward pass."""
        calls: dict[nn.Module, tuple[Any, Any]] = {}

        def record(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(module, (args, kwargs))

        hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
        try:
            with self.eager(), torch.no_grad(), context():
                run()
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def run_eagerly_if_wrong(self, run: Callable[[], object], context: Callable[[], Any]) -> str | None:
        """Compare one layer of each kind, compiled and eager, on the inputs that it is given in `run`.

        Run the layers eagerly if a compiled one gives other gradients; describes what was done. Not with FSDP.
        """
        kinds = list(self._kinds().values())
        if not kinds:
            return None
        calls = self._record_calls(kinds[-MAX_CHECKED_KINDS:], run, context)
        gap = max((_gradient_gap(layer, *call, context) for layer, call in calls.items()), default=0.0)
        if gap <= MAX_GRADIENT_GAP:
            return None
        _uncompile(self._layers)
        self._layers = []
        return f"torch.compile gives wrong gradients for this model ({gap:.0%} off); running eagerly: slower, correct"


def _varying_dims(calls: Sequence[Any]) -> list[list[int]]:
    """For each argument of a layer, the dimensions in which its calls differ."""
    dims = []
    for leaves in zip(*map(tree_leaves, calls), strict=False):
        shapes = [leaf.shape if isinstance(leaf, Tensor) else () for leaf in leaves]
        dims.append([dim for dim, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1])
    return dims


def _call_marked(call: Callable[..., Any], dims: list[list[int]], *args: Any, **kwargs: Any) -> Any:
    """Call with these dimensions of the arguments marked as dynamic."""
    for leaf, varying in zip(tree_leaves((args, kwargs)), dims, strict=False):
        for dim in varying if isinstance(leaf, Tensor) else ():
            torch._dynamo.maybe_mark_dynamic(leaf, dim)
    return call(*args, **kwargs)


def _layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """The settings of a layer and its modules but its number: layers that are equal in these compute the same."""
    return tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and key != "layer_idx"
    )


def _gradient_gap(layer: nn.Module, args: Any, kwargs: Any, context: Callable[[], Any]) -> float:
    """Largest difference between the gradients of a layer, compiled and eager; 0 where dropout makes any two differ."""
    weights = [weight for weight in layer.parameters() if weight.requires_grad]

    def gradients(call: Callable[..., Any], seed: int = 0) -> list[Tensor | None]:
        leaves = [each.detach().requires_grad_() if _is_hidden(each) else each for each in args]
        named = {name: each.detach().requires_grad_() if _is_hidden(each) else each for name, each in kwargs.items()}
        inputs = [each for each in (*leaves, *named.values()) if _is_hidden(each)]
        torch.manual_seed(seed)
        with context():
            output = call(*leaves, **named)
            hidden = output[0] if isinstance(output, tuple) else output
            loss = (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)).square().mean()
            with torch.autocast(loss.device.type, enabled=False):  # deterministic kernels in recomputation too
                return list(torch.autograd.grad(loss, [*weights, *inputs], allow_unused=True))

    expected = gradients(layer._call_impl)
    if _largest_gap(gradients(layer._call_impl, seed=1), expected) > MAX_GRADIENT_GAP / 10:
        return 0.0
    return _largest_gap(gradients(layer), expected)


def _largest_gap(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """Relative to the largest number of each tensor, or to a hundredth of the largest of all; 0 without finite ones."""
    pairs = [(one.float(), other.float()) for one, other in zip(actual, expected, strict=True)
             if one is not None and other is not None]  # fmt: skip
    scales = [float(other.abs().max()) for _, other in pairs]
    largest = max(scales, default=0.0)
    if not all(map(math.isfinite, scales)) or not largest:
        return 0.0
    gaps = (float((one - other).abs().nan_to_num(math.inf).max()) for one, other in pairs)
    return max(gap / max(scale, largest / 100) for gap, scale in zip(gaps, scales, strict=True))


def _is_hidden(value: Any) -> bool:
    """Whether an argument of a layer is its hidden states."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def _reduce_heads_in_registers() -> None:
    """Let inductor reduce a head at once, not in loops.

    The second loop of such a kernel reads what other threads wrote in the first, without a barrier: the gradients of
    Gemma 3's queries were wrong, and others in each run (torch 2.11, H200, 2026-11-18).
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_HEAD_DIM):
                return True
            return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    V.set_choices_handler(Choices())


@cache
def _code_hash() -> str:
    """Hash of what the compile cache does not know: our custom ops, which it keys by name, and our choices."""
    code = b"".join(Path(file).read_bytes() for file in (trainable.__file__, __file__))
    return f"modelwright {xxhash.xxh3_64_hexdigest(code)}"


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
