"""Training steps on the clock: of our engine, of the trainers of Transformers and TRL, and of torchtitan.

torchtitan's model, compilation, loss, optimizer and loop are its own; the data loader and the metrics processor are
what it lets a user put in. Written for torchtitan 0.2.2, the release that suits torch 2.11.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.common import Kernels, free_device, free_port, installed, now
from benchmarks.workloads import SEED, Workload, build
from modelwright.errors import UsageError

NOT_PROFILED = Kernels(False)
PEER_SETTINGS = {
    "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "optim": "adamw_torch_fused",
    "seed": SEED, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""What every peer is given: our order, our schedule, and nothing that it would do besides."""


@dataclass(frozen=True)
class StepTimes:
    """How one training went."""

    seconds: list[float]
    """Of each step."""
    losses: list[float]
    """Of each step."""
    before: float
    """Seconds before the first step began."""
    start: float
    """Seconds before the second step began: loading, compiling, recording."""
    memory: int = 0
    """The most bytes held on the device."""
    tokens: tuple[int, ...] = ()
    """Tokens of each step, where they are counted."""

    @property
    def step_seconds(self) -> float:
        """The median step of the second half."""
        return median(self.seconds[len(self.seconds) // 2 :])

    @property
    def mean_loss(self) -> float:
        """Over all steps: sides that learn the same come to the same."""
        return mean(self.losses)


def step_times(marks: list[float], losses: list[float], began: float, tokens: tuple[int, ...] = ()) -> StepTimes:
    """From the moments when training began and each step ended."""
    from modelwright.engine.throughput import peak_memory_bytes

    seconds = [after - before for before, after in pairwise(marks)]
    return StepTimes(seconds, losses, marks[0] - began, marks[1] - began, peak_memory_bytes(), tokens)


def train_ours(
    engine: Any,
    steps: int,
    began: float,
    profile: Kernels = NOT_PROFILED,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """The steps of our engine."""
    marks, losses, tokens = [clock()], list[float](), list[int]()
    for report in profile.during(engine.steps(), steps):
        marks.append(clock())
        losses.append(report.loss)
        tokens.append(report.tokens)
    return step_times(marks, losses, began, tuple(tokens))


def train_peer(
    trainer: type, config: type, settings: dict[str, Any], began: float, clock: Callable[[], float] = now, **given: Any
) -> tuple[StepTimes, Any]:
    """A trainer of Transformers or TRL: its steps, and itself; `settings` go into its config, `given` to it."""
    from datasets import disable_progress_bars
    from transformers import TrainerCallback

    marks: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(clock())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(clock())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    disable_progress_bars()
    with tempfile.TemporaryDirectory() as place:
        made = trainer(args=config(output_dir=place, **{**PEER_SETTINGS, **settings}), callbacks=[Clock()], **given)
        made.train()
    return step_times(marks, losses, began), made


def in_our_order(rows: Any, batch: int, steps: int) -> list[Any]:
    """Rows one after the other as our engine takes them."""
    from modelwright.data.sampler import GlobalBatchSampler

    order = GlobalBatchSampler(len(rows), batch, batch * steps, SEED)
    return [rows[row] for step in range(steps) for row in order.batch_indices(step)]


def conversation_dataset(conversations: list[Any]) -> Any:
    """Conversations as TRL reads them."""
    from datasets import Dataset

    turns = [each.messages for each in conversations]
    return Dataset.from_list([{"prompt": list(each[:-1]), "completion": list(each[-1:])} for each in turns])


FLAVOUR = "same shape as ours"
"""What our shape is called among those of its Llama."""


def train_torchtitan(work: Workload, settings: dict[str, Any], rows: np.ndarray[Any, Any]) -> StepTimes:
    """torchtitan's own Trainer over our rows, from the weights that ours begins with.

    settings: of torchtitan's JobConfig, by the names its command line has for them.
    """
    if installed("torchtitan") is None:
        raise UsageError("torchtitan is not installed")
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    began = time.perf_counter()
    marks: list[float] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as place, _one_rank():
        register_train_spec(place, titan_train_spec(work, titan_batches(work, rows), marks, losses))
        trainer = Trainer(titan_config(work, {"job.dump_folder": place, "model.name": place, **settings}, len(rows)))
        copy_our_weights(trainer.model_parts[0], work)
        free_device()
        marks.append(now())
        trainer.train()
        trainer.close()
    return step_times(marks, losses, began)


def titan_train_spec(work: Workload, data: list[Any], marks: list[float], losses: list[float]) -> Any:
    """Its Llama in our shape, fed with our rows, telling when each step has ended."""
    from dataclasses import replace

    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.llama3 import get_train_spec

    class Clock(MetricsProcessor):  # type: ignore[misc]
        def log(self, _: int, global_avg_loss: float, *__: Any, **___: Any) -> None:
            marks.append(now())
            losses.append(float(global_avg_loss))

    return replace(
        get_train_spec(), model_args={FLAVOUR: titan_shape(work)}, build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: data, build_metrics_processor_fn=lambda job, dims, _: Clock(job, dims),
    )  # fmt: skip


def titan_shape(work: Workload) -> Any:
    """The same Llama in torchtitan's words; its feed-forward part is as wide as the next multiple of what is wanted."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    return TransformerModelArgs(
        dim=work.width, n_layers=work.layers, n_heads=work.heads, n_kv_heads=work.key_heads, vocab_size=work.words,
        multiple_of=work.inner, ffn_dim_multiplier=0.5, norm_eps=1e-6, rope_theta=10_000, max_seq_len=work.length,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )  # fmt: skip


def titan_config(work: Workload, settings: dict[str, Any], rows: int) -> Any:
    """Its defaults, but for compiling, which it recommends, and what the other ways do too."""
    from torchtitan.config import JobConfig

    batch = work.rows * work.accumulation
    config = JobConfig()
    for name, value in {
        "model.flavor": FLAVOUR, "compile.enable": True, "debug.seed": SEED,
        "training.local_batch_size": work.rows, "training.global_batch_size": batch,
        "training.seq_len": work.length, "training.steps": rows // batch,
        "optimizer.lr": work.learning_rate, "optimizer.beta2": 0.999, "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0,
        "metrics.log_freq": 1, "comm.trace_buf_size": 0, **settings,
    }.items():  # fmt: skip
        *sections, last = name.split(".")
        section: Any = config
        for word in sections:
            section = getattr(section, word)
        getattr(section, last)  # a name that a later release no longer has is told, not set in vain
        setattr(section, last, value)
    return config


def titan_batches(work: Workload, rows: np.ndarray[Any, Any]) -> list[Any]:
    """Micro-batches in our order, as its data loader gives them: tokens and, one place on, what follows them."""
    import torch
    from torchtitan.components.loss import IGNORE_INDEX

    from modelwright.data.sampler import GlobalBatchSampler

    batch = work.rows * work.accumulation
    order = GlobalBatchSampler(len(rows), batch, len(rows), SEED)
    found = []
    for step in range(len(rows) // batch):
        for micro in np.split(np.asarray(order.batch_indices(step)), work.accumulation):
            tokens = torch.from_numpy(rows[micro])
            follows = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
            found.append(({"input": tokens}, follows))
    return found


def copy_our_weights(model: Any, work: Workload) -> None:
    """Give its model the weights that ours has before the first step."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    weights = Llama3StateDictAdapter(titan_shape(work), None).from_hf(build(work).state_dict())
    set_model_state_dict(model, weights)


@contextmanager
def _one_rank() -> Iterator[None]:
    """A world of one as torchrun would make it; the environment and the collecting of garbage are given back."""
    import torch

    before = dict(os.environ)
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )  # fmt: skip
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
        gc.enable()  # which its trainer takes into its own hands
