"""Predict a stage on a machine: memory against the card, seconds, hours and cost, with how sure that is."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError
from modelwright.plan.architecture import Movement, Shape, TextShape, VisionShape, movement
from modelwright.plan.calibration import Calibration
from modelwright.plan.gpus import Machines
from modelwright.plan.memory import Memory, memory
from modelwright.plan.stage import StagePlan
from modelwright.plan.time import StepTime, step_time
from modelwright.plan.work import Work
from modelwright.recipe.training import Images, Parts, Preference, Training

PRICES = Path(__file__).parent / "prices.json"
SMALL, RECORDINGS = 2_000_000_000, 4
"""Parameters below which a step is recorded, and how many shapes of rows are, as the engine has it."""
PADDING = 0.93
"""Share of places that hold a token where rows of like length share a micro-batch, as measured on short answers."""


@dataclass(frozen=True)
class Rows:
    """What is known of a stage's rows."""

    count: int | None
    """Rows in an epoch; None where nobody has looked."""
    longest: int
    """Tokens in the longest row (1 for images)."""
    mean: float
    """Tokens in a row on average."""
    learnt: float = 1.0
    """Share of tokens that are trained."""
    source: str = ""
    """How that is known."""
    resident: int = 0
    """Bytes of them that live on the device."""


@dataclass(frozen=True)
class Estimate:
    """One stage on one machine, predicted."""

    plan: StagePlan
    """Batch, steps, precision and sharding, with the reasons for each change."""
    machines: Machines
    """Where."""
    moves: Movement
    """What moves."""
    memory: Memory
    """The fullest moment on one card."""
    time: StepTime
    """The seconds of a step."""
    fits: bool
    """Whether the card holds it."""
    mends: tuple[str, ...]
    """Where it does not fit: what would."""
    sure: float
    """How far off the rate may be, as a share."""
    why_sure: str
    """What that stands on."""
    price: float | None
    """Of one card for an hour."""
    counted: bool
    """Whether the steps are known: without rows or max_steps there are no hours."""

    @property
    def seconds(self) -> float | None:
        """Seconds of all steps."""
        return self.time.seconds * self.plan.steps if self.counted else None

    @property
    def gpu_hours(self) -> float | None:
        """Hours times cards."""
        return None if self.seconds is None else self.seconds / 3600 * self.machines.world

    @property
    def cost(self) -> float | None:
        """What the hours cost."""
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    def as_json(self) -> dict[str, Any]:
        """Numbers as numbers."""
        gpu = self.machines.gpu
        return {
            "on": str(self.machines),
            "trained_parameters": self.moves.trained,
            "parameters": self.moves.total,
            "plan": {name: value for name, value in self.plan.as_json().items() if name != "predicted"},
            "fits": self.fits,
            "would_fit": list(self.mends),
            "memory": {**self.memory.as_json(), "card_bytes": round(gpu.memory)},
            "step_seconds": round(self.time.seconds, 5),
            "tokens_per_second": round(self.time.rate, 1),
            "mfu": round(self.time.flops / self.time.seconds / max(gpu.bf16, gpu.fp16), 4),
            "bound_by": self.time.bound,
            "hours": None if self.seconds is None else round(self.seconds / 3600, 4),
            "gpu_hours": None if self.gpu_hours is None else round(self.gpu_hours, 4),
            "cost": None if self.cost is None else round(self.cost, 2),
            "price_per_gpu_hour": self.price,
            "off_by_up_to": round(self.sure, 3),
            "because": self.why_sure,
        }

    def predicted(self) -> dict[str, Any]:
        """What a run keeps, to be held against what it measures."""
        return {
            "memory": self.memory.as_json(),
            "tokens_per_second": round(self.time.rate, 1),
            "step_seconds": round(self.time.seconds, 5),
            "seconds": None if self.seconds is None else round(self.seconds, 2),
            "off_by_up_to": round(self.sure, 3),
            "because": self.why_sure,
        }


def moves_of(shape: Shape, settings: Training) -> Movement:
    """What moves in a stage."""
    if isinstance(shape, TextShape):
        assert isinstance(settings, Parts)
        return movement(shape, settings)
    return Movement(shape.parameters, shape.parameters, 0, 0, True, False, False)


def is_recorded(wish: str, parameters: int, plan: StagePlan, on_gpu: bool) -> bool:
    """Whether the engine records its steps and replays them."""
    if not on_gpu or plan.world > 1 or plan.precision == "fp16" or plan.sharding != "ddp":
        return False
    return parameters < SMALL if wish == "auto" else wish == "always"


def work_of(shape: Shape, settings: Training, plan: StagePlan, rows: Rows, machines: Machines) -> Work:
    """A planned stage as the memory arithmetic sees it: with the longest rows."""
    on_gpu, per_node = machines.gpu.name != "CPU", machines.per_node
    moves = moves_of(shape, settings)
    recorded = is_recorded(settings.cuda_graphs, moves.total, plan, on_gpu)
    text = isinstance(shape, TextShape)
    keeps = text and getattr(settings, "keep_trunk", "off") != "off" and not moves.embeddings
    frozen = shape.layers - moves.crossed_layers if isinstance(shape, TextShape) and keeps else 0
    shared, halves = bool(getattr(settings, "share_prompt", False)), on_gpu and plan.precision != "fp32"
    return Work(
        shape=shape,
        moves=moves,
        rows=plan.per_device,
        length=rows.longest,
        accumulation=plan.accumulation,
        learnt=rows.learnt,
        eval_rows=0 if isinstance(settings, Images) else settings.per_device_eval_batch_size,
        precision=plan.precision,
        tf32=plan.tf32,
        by_row=plan.precision == "fp8" and plan.scaling == "rowwise",
        weights=plan.weights,
        optimizer=settings.optim,
        checkpointing=plan.gradient_checkpointing,
        compiled=settings.torch_compile or (on_gpu and plan.precision == "fp8"),
        on_gpu=on_gpu,
        recorded=recorded,
        recordings=RECORDINGS if rows.mean < rows.longest else 1,
        mean_width=2 if settings.exp_avg_dtype == "bf16" else 4,
        kept_layers=frozen,
        masked=shared and not halves,
        branched=shared and halves,
        chunked_loss=not isinstance(settings, Preference),  # pairs are judged by logits that stand whole
        quantization=getattr(settings, "quantization", "none"),
        sharding=plan.sharding,
        world=plan.world,
        per_node=per_node,
        resident=rows.resident,
    )


def estimate(
    work: Work, rows: Rows, plan: StagePlan, machines: Machines, calibration: Calibration
) -> tuple[Memory, StepTime]:
    """Memory with the longest rows and time with the usual ones."""
    packed = rows.mean >= rows.longest
    filled = 1.0 if packed or isinstance(work.shape, VisionShape) else PADDING
    usual = replace(work, length=max(1, min(rows.longest, round(rows.mean / filled))))
    time = step_time(usual, machines.gpu, calibration.pace, machines.link, filled)
    return memory(work, calibration.memory), time


def prices(path: Path | None) -> dict[str, float]:
    """Dollars for an hour of each card: the shipped round figures, and the user's own on top."""
    known = json.loads(PRICES.read_text(encoding="utf-8"))["dollars_per_gpu_hour"]
    if path is not None:
        try:
            own = json.loads(path.read_text(encoding="utf-8"))
            known |= {name: float(value) for name, value in own.get("dollars_per_gpu_hour", own).items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            wants = 'it wants JSON such as {"L4": 0.8, "H100": 3.5}'
            raise UsageError(f"--prices {path} could not be read ({error}); {wants}") from None
    return {str(name): float(value) for name, value in known.items()}
