"""A full fine-tune beside TRL's SFTTrainer: the same model, questions and answers, order and batch; rows a second.

Both sides see the same rows in the same steps, so that their losses can be held together; where the peer packs, it
decides by itself which rows make a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import (
    Kernels,
    clock,
    installed,
    ratio,
    require_finite,
    run_variants,
    select_variants,
    variant_lines,
)
from benchmarks.survival import SEED, Scene, conversations_of, load_model, prepared

LEARNING_RATE = 2e-5
LONGEST = 4096
"""Tokens in a packed row."""


@dataclass(frozen=True)
class Way:
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
        Way("ours, bf16", COMPILED),
        Way("ours, bf16, not compiled", {"precision": "bf16"}),
        Way("ours, bf16, packed, nothing shared", {**COMPILED, **PACKED, "share_prefix": False}),
        Way("TRL, bf16, liger", LIGER, peer=True),
        Way("TRL, bf16, liger, packed", {**LIGER, **PACKED}, peer=True),
        Way("TRL, bf16 weights, liger", LIGER, peer=True, halved=True),
    ),
    "tiny": (
        Way("ours, fp32", {"precision": "fp32"}),
        Way("ours, fp32, packed, nothing shared", {"precision": "fp32", "packing": True, "share_prefix": False}),
        Way("TRL, fp32", ON_CPU, peer=True),
        Way("TRL, fp32, packed", {**ON_CPU, "packing": True}, peer=True),
    ),
}  # fmt: skip
BATCH = {"smollm3": (16, 2), "tiny": (2, 2)}
"""Rows that the peer takes at once, and how often in a step: the same step for ours, which takes them all at once."""


@dataclass(frozen=True)
class Trial:
    """How one way went."""

    rows: float
    """Questions and answers in a step."""
    seconds: list[float]
    """Of each step."""
    losses: list[float]
    """Of each step."""
    start: float
    """Seconds before the second step began."""


@dataclass(frozen=True)
class Stand:
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

    from modelwright.engine.meter import memory_in_use

    shape = "smollm3" if torch.cuda.is_available() else "tiny"
    wanted = [way for way in select_variants(WAYS[shape], ways) if not way.peer or installed("trl")]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    at_once, times = BATCH[shape]
    scene = Scene(shape, None if shape == "smollm3" else 12, at_once * times, 1, steps)
    with tempfile.TemporaryDirectory() as place:
        rows = conversations_of(scene, data)
        stand = Stand(scene, rows, prepared(scene, rows, Path(place)), device, steps)

        def figures(way: Way, watch: Kernels) -> dict[str, Any]:
            trial = train_theirs(stand, way) if way.peer else train_ours(stand, way, watch)
            require_finite(trial.losses)
            return {
                "rows_per_second": round(trial.rows / median(trial.seconds[len(trial.seconds) // 2 :]), 2),
                "rows_a_step": round(trial.rows, 2), "memory_gb": round(memory_in_use() / 1e9, 2),
                "start_seconds": round(trial.start, 1), "losses": [round(loss, 4) for loss in trial.losses],
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


def train_ours(stand: Stand, way: Way, watch: Kernels) -> Trial:
    """Our engine; every weight moves."""
    from modelwright.engine.loop import Engine
    from modelwright.engine.world import World
    from modelwright.models import text
    from modelwright.plan.facts import probe
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import Sft
    from modelwright.tasks.sft import SftTask

    began = time.perf_counter()
    wish: dict[str, Any] = {"per_device_train_batch_size": stand.scene.batch, "max_length": 1024, **way.settings}
    settings = Sft.model_validate(
        {"max_steps": stand.steps, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", **wish}
    )
    model = load_model(stand.scene, stand.folder, stand.device, settings)
    text.move(model, stand.device, "auto")
    task = SftTask(model, text.load_tokenizer(stand.folder), stand.rows, settings, text.stop_tokens(model))
    in_a_row = len(task.train_set.rows) / task.rows
    if settings.packing:
        rows = max(1, round(stand.scene.batch / in_a_row))
        settings = settings.model_copy(update={"per_device_train_batch_size": rows})
    plan = plan_stage(settings, task.rows, 1, probe())
    engine = Engine(task, settings, plan, World(device=stand.device), SEED)
    marks, losses = [time.perf_counter()], []
    for report in watch.during(engine.steps(), stand.steps):
        losses.append(report.loss)
        marks.append(time.perf_counter())
    return _trial(plan.global_batch * in_a_row, marks, losses, began)


def train_theirs(stand: Stand, way: Way) -> Trial:
    """TRL's trainer on the same rows in our order."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    from modelwright.data.stream import Order
    from modelwright.models import text
    from modelwright.recipe.schema import Sft

    disable_progress_bars()
    began, scene = time.perf_counter(), stand.scene
    marks: list[float] = []
    losses: list[float] = []
    at_once, times = BATCH[scene.name]
    packs = bool(way.settings.get("packing"))
    # packed rows hold several: enough of them for every step
    count = scene.batch * stand.steps * (3 if packs else 1)
    order = Order(len(stand.rows.train), scene.batch, count, SEED)
    turns = [stand.rows.train[row].messages for step in range(count // scene.batch) for row in order.at(step)]
    data = Dataset.from_list([{"prompt": list(each[:-1]), "completion": list(each[-1:])} for each in turns])
    # several packed rows at once would become one with a mask of all by all: the peer is faster a row at a time
    at_once, times = (1, max(1, scene.batch // 10)) if packs else (at_once, times)
    wish = {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": times, "max_length": 1024}
    settings = SFTConfig(
        output_dir=str(stand.folder / "trl"), max_steps=stand.steps, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", optim="adamw_torch_fused", train_sampling_strategy="sequential", seed=SEED,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, **{**wish, **way.settings},
    )  # fmt: skip
    model = load_model(scene, stand.folder, stand.device, Sft())
    trainer = SFTTrainer(
        model=model.to(torch.bfloat16) if way.halved else model, args=settings, train_dataset=data,
        processing_class=text.load_tokenizer(stand.folder), callbacks=[clock(marks, losses)],
    )  # fmt: skip
    trainer.train()
    in_a_row = len(turns) / len(trainer.train_dataset)
    return _trial(at_once * times * in_a_row, marks, losses, began)


def _trial(rows: float, marks: list[float], losses: list[float], began: float) -> Trial:
    return Trial(rows, [after - before for before, after in pairwise(marks)], losses, marks[1] - began)
