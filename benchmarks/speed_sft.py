"""A full fine-tune beside TRL's SFTTrainer: the same model, questions and answers, order and batch; rows a second.

Both sides see the same rows in the same steps, so that their losses can be held together; where the peer packs, it
decides by itself which rows make a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Kernels,
    installed,
    ratio,
    require_finite,
    run_variants,
    select_variants,
    variant_lines,
)
from benchmarks.peer_trainers import StepTimes, conversation_dataset, in_our_order, train_ours, train_peer
from benchmarks.survival import Scene, conversations_of, load_model, prepared
from benchmarks.workloads import SEED

LEARNING_RATE = 2e-5
LONGEST = 4096
"""Tokens in a packed row."""


@dataclass(frozen=True)
class SftVariant:
    """One way to fine-tune."""

    name: str
    """What the table calls it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of our sft section, or of their SFTConfig."""
    peer: bool = False
    """Whether TRL does it."""
    halved: bool = False
    """Whether the peer's weights are plain bf16: faster, and without exact masters."""


COMPILED = {"precision": "bf16", "torch_compile": True}
LIGER = {"bf16": True, "use_liger_kernel": True, "gradient_checkpointing": False}
ON_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
PACKED = {"packing": True, "max_length": LONGEST}
WAYS = {
    "smollm3": (
        SftVariant("ours, bf16", COMPILED),
        SftVariant("ours, bf16, not compiled", {"precision": "bf16"}),
        SftVariant("ours, bf16, packed, nothing shared", {**COMPILED, **PACKED, "share_prefix": False}),
        SftVariant("TRL, bf16, liger", LIGER, peer=True),
        SftVariant("TRL, bf16, liger, packed", {**LIGER, **PACKED}, peer=True),
        SftVariant("TRL, bf16 weights, liger", LIGER, peer=True, halved=True),
    ),
    "tiny": (
        SftVariant("ours, fp32", {"precision": "fp32"}),
        SftVariant("ours, fp32, packed, nothing shared", {"precision": "fp32", "packing": True, "share_prefix": False}),
        SftVariant("TRL, fp32", ON_CPU, peer=True),
        SftVariant("TRL, fp32, packed", {**ON_CPU, "packing": True}, peer=True),
    ),
}  # fmt: skip
BATCH = {"smollm3": (16, 2), "tiny": (2, 2)}
"""Rows that the peer takes at once, and how often in a step: the same step for ours, which takes them all at once."""


@dataclass(frozen=True)
class BenchSetup:
    """What every way is given."""

    scene: Scene
    """Which shape."""
    rows: Any
    """Questions and answers."""
    folder: Path
    """The tokenizer, and room for files."""
    device: Any
    """What computes."""
    steps: int
    """Steps of each way."""


def measure(ways: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> dict[str, Any]:
    """Each way in turn; one that fails tells why and the others go on."""
    import torch

    shape = "smollm3" if torch.cuda.is_available() else "tiny"
    wanted = [way for way in select_variants(WAYS[shape], ways) if not way.peer or installed("trl")]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    at_once, times = BATCH[shape]
    scene = Scene(shape, None if shape == "smollm3" else 12, at_once * times, 1, steps)
    with tempfile.TemporaryDirectory() as place:
        rows = conversations_of(scene, data)
        setup = BenchSetup(scene, rows, prepared(scene, rows, Path(place)), device, steps)

        def figures(way: SftVariant, watch: Kernels) -> dict[str, Any]:
            rows_a_step, times = train_trl(setup, way) if way.peer else train_modelwright(setup, way, watch)
            require_finite(times.losses)
            return {
                "rows_per_second": round(rows_a_step / times.step_seconds, 2),
                "rows_a_step": round(rows_a_step, 2), "memory_gb": round(times.memory / 1e9, 2),
                "start_seconds": round(times.start, 1), "losses": [round(loss, 4) for loss in times.losses],
            }  # fmt: skip

        told = run_variants(wanted, kernels, figures)
    return {"shape": shape, "rows": len(rows.train), "ways": told, **ratio(told, "rows_per_second")}


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"  full fine-tune of the {figures['shape']} shape, {figures['rows']} questions and answers"

    def line(_: str, way: dict[str, Any]) -> str:
        return (
            f"{way['rows_per_second']:,.1f} rows/s, {way['rows_a_step']:.1f} rows a step, {way['memory_gb']:.1f} GB, "
            f"{way['start_seconds']:.0f} s to start, loss {way['losses'][0]:.3f} → {way['losses'][-1]:.3f}"
        )

    yield from variant_lines(figures["ways"], line)
    if "ratio" in figures:
        yield f"  ratio {figures['ratio']:.2f} (above 1: ours is faster)"


def train_modelwright(setup: BenchSetup, way: SftVariant, watch: Kernels) -> tuple[float, StepTimes]:
    """Our engine; every weight moves."""
    from modelwright.engine.distributed import World
    from modelwright.engine.trainer import Engine
    from modelwright.models import pretrained
    from modelwright.plan.hardware import probe_device
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import SftConfig
    from modelwright.tasks.sft import SftTask

    began = time.perf_counter()
    wish: dict[str, Any] = {"per_device_train_batch_size": setup.scene.batch, "max_length": 1024, **way.settings}
    settings = SftConfig.model_validate(
        {"max_steps": setup.steps, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", **wish}
    )
    model = load_model(setup.scene, setup.folder, setup.device, settings)
    pretrained.prepare_model(model, setup.device, "auto")
    task = SftTask(
        model, pretrained.load_tokenizer(setup.folder), setup.rows, settings, pretrained.eos_token_ids(model)
    )
    in_a_row = len(task.train_set.rows) / task.rows
    if settings.packing:
        rows = max(1, round(setup.scene.batch / in_a_row))
        settings = settings.model_copy(update={"per_device_train_batch_size": rows})
    plan = plan_stage(settings, task.rows, 1, probe_device())
    engine = Engine(task, settings, plan, World(device=setup.device), SEED)
    return plan.global_batch_size * in_a_row, train_ours(engine, setup.steps, began, watch)


def train_trl(setup: BenchSetup, way: SftVariant) -> tuple[float, StepTimes]:
    """TRL's trainer on the same rows in our order."""
    import torch
    from trl import SFTConfig, SFTTrainer

    from modelwright.models import pretrained
    from modelwright.recipe.schema import SftConfig

    began, scene = time.perf_counter(), setup.scene
    at_once, times = BATCH[scene.name]
    packs = bool(way.settings.get("packing"))
    # packed rows hold several: enough of them for every step
    rows = in_our_order(setup.rows.train, scene.batch, setup.steps * (3 if packs else 1))
    # several packed rows at once would become one with a mask of all by all: the peer is faster a row at a time
    at_once, times = (1, max(1, scene.batch // 10)) if packs else (at_once, times)
    settings = {
        "max_steps": setup.steps, "learning_rate": LEARNING_RATE, "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": times, "max_length": 1024, **way.settings,
    }  # fmt: skip
    model = load_model(scene, setup.folder, setup.device, SftConfig())
    measured, trainer = train_peer(
        SFTTrainer, SFTConfig, settings, began, model=model.to(torch.bfloat16) if way.halved else model,
        train_dataset=conversation_dataset(rows), processing_class=pretrained.load_tokenizer(setup.folder),
    )  # fmt: skip
    return at_once * times * len(rows) / len(trainer.train_dataset), measured
