"""Training speed on one device, compared with HF Trainer, TRL and torchtitan: same model, rows, order and batch.

Pretraining and LoRA of random Llamas in tokens/s, MFU, memory and loss; SFT in rows/s; DPO in pairs/s; the survival
fine-tune with cached frozen layers; a small SFT on a CPU; and the time from the command to the first step. Without a
GPU the same code runs on tiny models, to show that it works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import common, finetuning, peer_trainers, startup, workloads
from benchmarks.common import KernelProfile, ratio, require_finite, run_variants, select_variants, variant_lines
from benchmarks.peer_trainers import (
    StepTimes,
    device_name,
    in_engine_order,
    make_engine,
    torch_device,
    train_engine,
    train_peer,
)
from benchmarks.workloads import VARIANTS, WORKLOADS, Variant, Workload
from modelwright.errors import UsageError

Figures = dict[str, Any]
LATE_STEPS = 50
"""Steps at the end whose mean loss is compared."""


def measure(
    work: str = "", variants: Sequence[str] = (), steps: int = 12, rows: Path | None = None, kernels: bool = False
) -> Figures:
    """Run the variants of a workload in turn; one that fails is reported and the others run.

    rows: an .npy of token ids of real text instead of random rows; for sft and survival a file of questions and
    answers. kernels: whether to profile the kernels of a step.
    """
    work = work or default_work()
    figures: Figures = {"work": work, "device": device_name(), "steps": steps, "variants": {}}
    if work in OTHERS:
        return figures | dict(OTHERS[work][0](variants, steps, rows, kernels))

    def train(variant: Variant, profile: KernelProfile) -> Figures:
        times = train_variant(WORKLOADS[work], variant, workloads.token_rows(WORKLOADS[work], steps, rows), profile)
        return pretrain_figures(WORKLOADS[work], times)

    figures["variants"] = run_variants(select_variants(VARIANTS[work], variants), kernels, train)
    return figures | ratio(figures["variants"], "tokens_per_second")


def merge_result(figures: Figures) -> Figures:
    """These figures, with date and commit, among the saved ones of other workloads."""
    require_same_device(figures["work"], figures["device"])
    before, now = common.load_result("speed"), common.result("speed", {})
    own = {**figures, "measured": {name: now[name] for name in ("date", "commit")}}
    return {**(before["figures"] if before else {}), figures["work"]: own}


def require_same_device(work: str = "", device: str = "") -> None:
    """Refuse to replace the figures of another device."""
    work, device = work or default_work(), device or device_name()
    before = common.load_result("speed")
    saved = before["figures"].get(work, {}).get("device", device) if before else device
    if saved != device:
        raise UsageError(f"--save: the saved figures of {work} are of {saved}, and this is {device}; leave out --save")


def lines(figures: Figures) -> Iterator[str]:
    """The table."""
    yield f"{figures['work']} on {figures['device']}, {figures['steps']} steps"
    if figures["work"] in OTHERS:
        yield from OTHERS[figures["work"]][1](figures)
        return

    def line(name: str, variant: Figures) -> str:
        mfu = f", {variant['mfu']:.1%} MFU" if variant["mfu"] else ""
        return (
            f"{variant['tokens_per_second']:,.0f} tokens/s{mfu}, {variant['memory_gb']:.1f} GB, "
            f"{variant['start_seconds']:.0f} s to start, loss {variant['loss_first']:.3f} → "
            f"{variant['loss_last']:.3f}{gap_to_exact(figures, name)}"
        )

    yield from variant_lines(figures, line)


def gap_to_exact(figures: Figures, name: str) -> str:
    """How far a variant's loss ends from that of fp32 weights, where both ran for long enough."""
    curves = {
        each: figures["variants"].get(each, {}).get("losses", [])[-LATE_STEPS:] for each in (workloads.EXACT, name)
    }
    if name == workloads.EXACT or figures["steps"] < 2 * LATE_STEPS or not all(curves.values()):
        return ""
    exact, other = (mean(curve) for curve in curves.values())
    return f", {other / exact - 1:+.2%} of exact weights' over the last {LATE_STEPS} steps"


def train_variant(
    workload: Workload, variant: Variant, rows: np.ndarray[Any, Any], profile: KernelProfile
) -> StepTimes:
    """Train the rows with the trainer of the variant."""
    if variant.titan is not None:
        return peer_trainers.train_torchtitan(workload, variant.titan, rows)
    if variant.peer is not None:
        return train_hf(workload, variant, rows)
    return train_modelwright(workload, variant, rows, profile)


def train_modelwright(
    workload: Workload,
    variant: Variant,
    rows: np.ndarray[Any, Any],
    profile: KernelProfile = peer_trainers.NOT_PROFILED,
) -> StepTimes:
    """Our engine over the rows."""
    from modelwright.models import activation_checkpoint, pretrained, trainable
    from modelwright.recipe.stage_specs import LoraStageConfig, PretrainConfig

    began, steps = time.perf_counter(), len(rows) // workload.batch
    settings = (LoraStageConfig if workload.lora else PretrainConfig).model_validate({
        "max_steps": steps, "per_device_train_batch_size": workload.rows, "learning_rate": workload.learning_rate,
        "gradient_accumulation_steps": workload.accumulation, "lr_scheduler_type": "constant", **variant.settings,
    })  # fmt: skip
    model = workloads.random_llama(workload)
    pretrained.prepare_model(model, torch_device(), "auto")
    task = workloads.TokenRowsTask(trainable.set_trainable(model, settings), rows)
    if settings.gradient_checkpointing != "auto":
        activation_checkpoint.enable_activation_checkpointing(model, settings.gradient_checkpointing)
    return train_engine(make_engine(task, settings), steps, began, profile)


def train_hf(workload: Workload, variant: Variant, rows: np.ndarray[Any, Any]) -> StepTimes:
    """The HF Trainer on the same rows in our order."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    began, steps = time.perf_counter(), len(rows) // workload.batch
    tokens = [row.tolist() for row in in_engine_order(rows, workload.batch, steps)]
    settings = {
        "max_steps": steps, "per_device_train_batch_size": workload.rows, "learning_rate": workload.learning_rate,
        "gradient_accumulation_steps": workload.accumulation, **(variant.peer or {}),
    }  # fmt: skip
    data = Dataset.from_dict({"input_ids": tokens, "labels": tokens}).with_format("torch")
    model = _peft_model(workload) if workload.lora else workloads.random_llama(workload)
    return train_peer(Trainer, TrainingArguments, settings, began, model=model, train_dataset=data)[0]


def _peft_model(workload: Workload) -> Any:
    """The model with LoRA; on a GPU the frozen weights are bf16, as users of PEFT load them."""
    import torch

    from modelwright.models.trainable import add_lora
    from modelwright.recipe.stage_specs import LoraStageConfig

    model = workloads.random_llama(workload)
    model = add_lora(model.bfloat16() if torch.cuda.is_available() else model, LoraStageConfig())
    model.enable_input_require_grads()  # which their checkpointing needs with frozen embeddings
    return model


def pretrain_figures(workload: Workload, times: StepTimes) -> Figures:
    """Speed, memory and losses of one variant."""
    from modelwright.plan.hardware import probe_device

    require_finite(times.losses)
    rate, peak = workload.batch * workload.length / times.step_seconds, probe_device().peak_flops
    return {
        "tokens_per_second": round(rate, 1),
        "mfu": round(rate * workloads.flops_per_token(workload) / peak, 4) if peak else None,
        **times.summary(),
        "loss_first": times.losses[0],
        "loss_last": times.losses[-1],
        "losses": [round(loss, 4) for loss in times.losses],
    }


OTHERS: dict[str, tuple[Callable[..., Figures], Callable[[Figures], Iterator[str]]]] = {
    "sft": (finetuning.measure_sft, finetuning.sft_lines),
    "dpo": (finetuning.measure_dpo, finetuning.dpo_lines),
    "sft-small": (finetuning.measure_small_sft, finetuning.small_sft_lines),
    **{work: (partial(finetuning.measure_survival, scenario), finetuning.survival_lines)
       for work, scenario in workloads.SURVIVAL.items()},
    "start": (startup.measure_first_step, startup.first_step_lines),
}  # fmt: skip
"""Workloads that are more than token rows through one model."""
RESULT_NAMES = {"sft-small": "sft", **dict.fromkeys(workloads.SURVIVAL, "survival")}
"""Workloads with a result file of their own."""
KNOWN = (*WORKLOADS, *OTHERS)


def default_work() -> str:
    """The workload where none is named."""
    return "0.5b" if torch_device().type == "cuda" else "tiny"


def main(
    work: Annotated[
        str,
        typer.Option("--work", help="135m, 0.5b, fp32, 6b, lora, sft, dpo, survival-3b (for a large GPU), start, "
                     "tiny, tiny-lora, sft-small, survival, survival-tiny."),
    ] = "",
    variants: Annotated[
        list[str] | None, typer.Option("--variant", metavar="WORD", help="Variants with this word in their name.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps per variant; for start, between saves.")] = 12,
    rows: Annotated[
        Path | None,
        typer.Option("--rows", "--tokens", help="An .npy of token ids; for sft and survival, questions and answers."),
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Profile the kernels of a step.")] = False,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:  # fmt: skip
    """Tokens, rows or pairs per second, compared with HF Trainer, TRL and torchtitan; time to the first step."""
    if work and work not in KNOWN:
        raise UsageError(f"--work is {work!r}; it wants one of {', '.join(KNOWN)}")
    name = RESULT_NAMES.get(work, "speed")
    if save and name == "speed":
        require_same_device(work)  # before it is measured, which takes long
    run = partial(measure, work, variants or (), steps, rows, kernels)
    common.report(name, run, lines, save, as_json, merge_result if name == "speed" else None)


if __name__ == "__main__":
    common.run(main)
