"""Our engine beside the peers on one GPU: the same model, rows and batch; tokens/s, MFU, memory, and the loss.

On a machine without a GPU the same code runs a model of a few thousand weights, to show that it works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import common, speed_dpo, speed_sft, startup
from benchmarks.common import Kernels, ratio, require_finite, run_variants, select_variants, variant_lines
from benchmarks.peer_trainers import NOT_PROFILED, StepTimes, in_our_order, train_ours, train_peer, train_torchtitan
from benchmarks.workloads import EXACT, SEED, WAYS, WORKS, Rows, Variant, Workload, build, flops_per_token, rows_of
from modelwright.errors import UsageError

LATE = 50
"""Steps at the end whose mean loss is compared."""
OTHERS: dict[str, tuple[Any, Any]] = {
    "sft": (speed_sft.measure, speed_sft.lines),
    "dpo": (speed_dpo.measure, speed_dpo.lines),
    "start": (startup.measure_first_step, startup.first_step_lines),
}
"""Works that are more than rows of one length through one model."""
KNOWN = (*WORKS, *OTHERS)


def measure(
    work: str = "", ways: Sequence[str] = (), steps: int = 12, rows: Path | None = None, kernels: bool = False
) -> dict[str, Any]:
    """Each way in turn over the same rows; a way that fails tells why and the others go on.

    rows: an .npy of token numbers of real text, in place of made-up rows, so that the curves can be held together;
    for sft a file of questions and answers. kernels: whether to tell what the device does in a step.
    """
    work = work or _usual()
    told: dict[str, Any] = {"work": work, "device": _device(), "steps": steps, "ways": {}}
    if work in OTHERS:
        return told | dict(OTHERS[work][0](ways, steps, rows, kernels))

    def figures(way: Variant, watch: Kernels) -> dict[str, Any]:
        pace = train(WORKS[work], way, rows_of(WORKS[work], steps, rows), watch)
        require_finite(pace.losses)
        return _figures(WORKS[work], pace)

    told["ways"] = run_variants(select_variants(WAYS[work], ways), kernels, figures)
    return told | ratio(told["ways"], "tokens_per_second")


def kept_with(figures: dict[str, Any]) -> dict[str, Any]:
    """These figures, with their day and commit, among those of other works that were kept before."""
    may_be_kept(figures["work"], figures["device"])
    before, stand = common.kept("speed"), common.result("speed", {})
    own = {**figures, "measured": {name: stand[name] for name in ("date", "commit")}}
    return {**(before["figures"] if before else {}), figures["work"]: own}


def may_be_kept(work: str = "", device: str = "") -> None:
    """Refuse to put figures in the place of those that another device has measured; without a name, of this one."""
    work, device = work or _usual(), device or _device()
    before = common.kept("speed")
    kept = before["figures"].get(work, {}).get("device", device) if before else device
    if kept != device:
        raise UsageError(f"--save: figures of {work} are kept of {kept}, and this is {device}; leave out --save")


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"{figures['work']} on {figures['device']}, {figures['steps']} steps"
    if figures["work"] in OTHERS:
        yield from OTHERS[figures["work"]][1](figures)
        return

    def line(name: str, way: dict[str, Any]) -> str:
        share = f", {way['mfu']:.1%} MFU" if way["mfu"] else ""
        return (
            f"{way['tokens_per_second']:,.0f} tokens/s{share}, {way['memory_gb']:.1f} GB, "
            f"{way['start_seconds']:.0f} s to start, loss {way['loss_first']:.3f} → {way['loss_last']:.3f}"
            + gap_to_exact(figures, name)
        )

    yield from variant_lines(figures["ways"], line)
    if "ratio" in figures:
        yield f"  ratio {figures['ratio']:.2f} (above 1: ours is faster)"


def gap_to_exact(figures: dict[str, Any], name: str) -> str:
    """How far a way's loss ends from that of exact fp32 weights, where those were measured for long enough."""
    curves = {way: figures["ways"].get(way, {}).get("losses", [])[-LATE:] for way in (EXACT, name)}
    if name == EXACT or figures["steps"] < 2 * LATE or not all(curves.values()):
        return ""
    exact, other = (mean(curve) for curve in curves.values())
    return f", {other / exact - 1:+.2%} of exact weights' over the last {LATE} steps"


def train(work: Workload, way: Variant, rows: np.ndarray[Any, Any], watch: Kernels) -> StepTimes:
    """One way over the rows, by whoever it names."""
    if way.titan is not None:
        return train_torchtitan(work, way.titan, rows)
    return train_modelwright(work, way, rows, watch) if way.peer is None else train_hf(work, way, rows)


def train_modelwright(
    work: Workload, way: Variant, rows: np.ndarray[Any, Any], watch: Kernels = NOT_PROFILED
) -> StepTimes:
    """Our engine on one device."""
    from modelwright.engine.distributed import World
    from modelwright.engine.trainer import Engine
    from modelwright.models import activation_checkpoint, pretrained, trainable
    from modelwright.plan.hardware import probe_device
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import LoraStageConfig, PretrainConfig

    began, steps = time.perf_counter(), len(rows) // (work.rows * work.accumulation)
    settings = (LoraStageConfig if work.lora else PretrainConfig).model_validate({
        "max_steps": steps, "per_device_train_batch_size": work.rows, "learning_rate": work.learning_rate,
        "gradient_accumulation_steps": work.accumulation, "lr_scheduler_type": "constant", **way.settings,
    })  # fmt: skip
    world = replace(World(), device=_torch_device())
    model = build(work)
    pretrained.prepare_model(model, world.device, "auto")
    task = Rows(trainable.set_trainable(model, settings), rows)
    activation_checkpoint.enable_activation_checkpointing(model, settings.gradient_checkpointing)
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, probe_device()), world, SEED)
    return train_ours(engine, steps, began, watch)


def train_hf(work: Workload, way: Variant, rows: np.ndarray[Any, Any]) -> StepTimes:
    """The HF Trainer on the same rows in our order."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    began, batch = time.perf_counter(), work.rows * work.accumulation
    turns = [row.tolist() for row in in_our_order(rows, batch, len(rows) // batch)]
    settings = {
        "max_steps": len(rows) // batch, "per_device_train_batch_size": work.rows, "learning_rate": work.learning_rate,
        "gradient_accumulation_steps": work.accumulation, **(way.peer or {}),
    }  # fmt: skip
    data = Dataset.from_dict({"input_ids": turns, "labels": turns}).with_format("torch")
    return train_peer(Trainer, TrainingArguments, settings, began, model=_their_model(work), train_dataset=data)[0]


def _their_model(work: Workload) -> Any:
    """The same model; beside low-rank matrices the frozen weights are bf16 on a GPU, as their users load them."""
    import torch

    from modelwright.models.trainable import add_lora
    from modelwright.recipe.schema import LoraStageConfig

    model = build(work)
    if not work.lora:
        return model
    model = add_lora(model.bfloat16() if torch.cuda.is_available() else model, LoraStageConfig())
    model.enable_input_require_grads()  # which their checkpointing asks of frozen embeddings
    return model


def _figures(work: Workload, pace: StepTimes) -> dict[str, Any]:
    tokens = work.rows * work.length * work.accumulation
    rate = tokens / pace.step_seconds
    peak = _peak()
    return {
        "tokens_per_second": round(rate, 1),
        "mfu": round(rate * flops_per_token(work) / peak, 4) if peak else None,
        "memory_gb": round(pace.memory / 1e9, 2),
        "start_seconds": round(pace.start, 1),
        "loss_first": pace.losses[0],
        "loss_last": pace.losses[-1],
        "losses": [round(loss, 4) for loss in pace.losses],
    }


def _usual() -> str:
    """What is measured where nothing is asked for."""
    import torch

    return "0.5b" if torch.cuda.is_available() else "tiny"


def _torch_device() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _device() -> str:
    from modelwright.plan.hardware import probe_device

    return probe_device().name


def _peak() -> float | None:
    from modelwright.plan.hardware import probe_device

    return probe_device().peak_flops


def main(
    work: Annotated[
        str, typer.Option("--work", help="135m, 0.5b, fp32, 6b, lora, sft, dpo (for a large GPU), start, or tiny.")
    ] = "",
    ways: Annotated[list[str] | None, typer.Option("--way", metavar="WORD", help="Ways with this word.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each way; for start, between saves.")] = 12,
    rows: Annotated[
        Path | None,
        typer.Option("--rows", "--tokens", help="An .npy of tokens of real text; for sft, questions and answers."),
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Tell what the device does in a step.")] = False,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Tokens, rows or pairs a second on one GPU, beside HF Trainer, TRL and torchtitan; time to the first step."""
    if work and work not in KNOWN:
        raise UsageError(f"--work is {work!r}; it wants one of {', '.join(KNOWN)}")
    if save:
        may_be_kept(work)  # before it is measured, for which some works take long
    common.report("speed", lambda: measure(work, ways or (), steps, rows, kernels), lines, save, as_json, kept_with)


if __name__ == "__main__":
    common.run(main)
