"""The techniques that the document of the 7B pipeline claims a speed-up for, each measured alone.

Every technique is switched off, or on where it is not a default, with all else equal. The model has the layers of
llama-7b, but only eight of them, so that it also fits with eager attention, which keeps all attention scores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from benchmarks import ablation, common
from benchmarks.ablation import Figures, SpecialPath, Work
from benchmarks.common import Progress
from benchmarks.peer_trainers import device_name, torch_device
from benchmarks.tables import techniques_table
from benchmarks.workloads import COMPILED, Workload
from modelwright.errors import UsageError

LAYERS = Workload(8, 4096, 11008, 32, 8, rows=4, length=2048, learning_rate=1e-5)
EXACT = {**COMPILED, "param_dtype": "fp32"}
UNSHARED = {**COMPILED, "share_prefix": False, "max_length": 2048}
ATTENTION_SHAPE = (4, 32, 2048, 128)
"""Rows, heads, tokens and head size of the attention measured without the rest of the model."""
WORKS = {
    "pretrain": Work("8 layers of llama-7b, 4 × 2048", "tokens", partial(ablation.train_tokens, LAYERS), 12, COMPILED),
    "fp32 weights": Work(
        "the same with fp32 weights, as torch's AdamW has", "tokens", partial(ablation.train_tokens, LAYERS), 12, EXACT
    ),
    "sft": Work("SFT, SmolLM3-3B shape, 32 rows a step", "rows", partial(ablation.train_sft, 32), 10, UNSHARED),
}


@dataclass(frozen=True)
class Technique:
    """A row of the document's table of optimizations."""

    name: str
    """For --only."""
    claim: str
    """What the document says it brings."""
    work: str
    """Name in WORKS."""
    path: SpecialPath
    """What changes the work."""
    is_switched_on: bool = False
    """Whether the path switches the technique on, as fp8, and not off."""


def _eager_attention() -> AbstractContextManager[Any]:
    """Attention that computes and keeps all scores."""
    from modelwright.models import pretrained

    def prepare(model: Any, device: Any, _attn_implementation: str, packed: bool = True) -> None:
        model.set_attn_implementation("eager")
        original(model, device, "eager", packed)

    original = pretrained.prepare_model
    return patch.object(pretrained, "prepare_model", prepare)


def _foreach_adamw() -> AbstractContextManager[Any]:
    """torch's AdamW without its fused kernel."""
    from modelwright.engine import optimizer

    class ForeachAdamW(optimizer.FusedAdamW):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "fused": False, "foreach": True})

    return patch.object(optimizer, "FusedAdamW", ForeachAdamW)


def _path(name: str, work: str, settings: dict[str, Any] | None = None, **switch: Any) -> SpecialPath:
    return SpecialPath(name, "", work, settings or {}, repeats=1, **switch)


TECHNIQUES = (
    Technique("fp8", "30–40 %", "pretrain", _path("fp8", "pretrain", {"precision": "fp8"}), is_switched_on=True),
    Technique("compile", "30–100 %", "pretrain", _path("compile", "pretrain", {"torch_compile": False})),
    Technique("attention", "2–4 × of attention", "pretrain", _path("attention", "pretrain", patch=_eager_attention)),
    Technique("fused-adamw", "5–10 %", "fp32 weights", _path("fused-adamw", "fp32 weights", patch=_foreach_adamw)),
    Technique("packing", "up to 6 ×", "sft", _path("packing", "sft", {"packing": True}), is_switched_on=True),
)
NAMES = tuple(technique.name for technique in TECHNIQUES)


def measure(only: Sequence[str] = (), tiny: bool = False) -> Figures:
    """Every technique, or those named."""
    if unknown := [name for name in only if name not in NAMES]:
        raise UsageError(f"--only is {unknown[0]!r}; it wants one of {', '.join(NAMES)}")
    figures: Figures = {"device": device_name(), "tiny": tiny, "techniques": {}}
    plain: dict[str, Figures] = {}
    for technique in TECHNIQUES:
        if technique.name not in (only or NAMES):
            continue
        work, progress = WORKS[technique.work], Progress(technique.name)
        if technique.work not in plain:
            plain[technique.work] = ablation.train(work, None, tiny)
        changed = ablation.train(work, technique.path, tiny)
        sides = [plain[technique.work], changed]
        without, with_it = sides if technique.is_switched_on else sides[::-1]
        row: Figures = {"claim": technique.claim, "work": work.label, "unit": work.unit}
        row |= {"without": _figures(without), "with": _figures(with_it)}
        if "per_second" in without and "per_second" in with_it:
            row["ratio"] = round(with_it["per_second"] / without["per_second"], 3)
        figures["techniques"][technique.name] = row
        progress.log(str(row))  # a run that is stopped keeps what was measured
    if "attention" in figures["techniques"]:
        figures["techniques"]["attention"]["alone"] = attention_alone(tiny)
    return figures


def _figures(run: Figures) -> Figures:
    if "failed" in run:
        return run
    return {key: round(run[key], 5) for key in ("step_seconds", "per_second", "memory_gb")}


def attention_alone(tiny: bool) -> Figures:
    """Milliseconds of causal attention, forward and backward, with all scores and by the kernel that ours uses."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    device, shape = torch_device(), (1, 2, 64, 16) if tiny else ATTENTION_SHAPE
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.full(shape[2:3] * 2, float("-inf"), device=device, dtype=dtype).triu(1)
    fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if device.type == "cuda" else [SDPBackend.MATH]

    def plain() -> torch.Tensor:
        scores = query @ key.transpose(2, 3) / shape[3] ** 0.5 + mask
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype) @ value

    def fused() -> torch.Tensor:
        with sdpa_kernel(fast):
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    seconds = {name: _seconds(forward) for name, forward in (("plain", plain), ("fused", fused))}
    return {f"{name}_ms": round(1e3 * each, 3) for name, each in seconds.items()} | {
        "ratio": round(seconds["plain"] / seconds["fused"], 2)
    }


def _seconds(forward: Any, repeats: int = 20) -> float:
    """Mean seconds of a forward and its backward."""
    import torch

    def wait() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(3):
        forward().sum().backward()
    began = wait()
    for _ in range(repeats):
        forward().sum().backward()
    return (wait() - began) / repeats


def lines(figures: Figures) -> Iterator[str]:
    """The device, and the table."""
    yield f"{figures['device']}{', tiny' * figures['tiny']}"
    yield techniques_table(figures)


def main(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="This one; repeatable.")] = None,
    rows: Annotated[Path | None, typer.Option("--rows", help="Questions and answers for SFT.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny models on any device, to see that it works.")] = False,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """What each technique of the 7B pipeline's document brings, measured alone beside what the document claims."""
    ablation.ROWS = rows
    common.report("techniques", lambda: measure(only or (), tiny), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
