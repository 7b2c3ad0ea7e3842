"""Timed training steps of our engine, of the trainers of Transformers and TRL, and of torchtitan.

torchtitan's model, compilation, loss, optimizer and loop are its own; the data loader and the metrics processor are
ours. Written for torchtitan 0.2.2, the release that suits torch 2.11.
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

from benchmarks.common import KernelProfile, free_device, free_port, installed, now
from benchmarks.workloads import SEED, Workload, random_llama
from modelwright.errors import UsageError

NOT_PROFILED = KernelProfile(False)
PEER_SETTINGS = {
    "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "optim": "adamw_torch_fused",
    "seed": SEED, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""Settings of every peer: our order, our schedule, no saving or reporting."""


@dataclass(frozen=True)
class StepTimes:
    """Times and losses of one training."""

    seconds: list[float]
    """Of each step."""
    losses: list[float]
    """Of each step."""
    before: float
    """Seconds before the first step began."""
    start: float
    """Seconds before the second step began: loading, compiling, CUDA graph capture."""
    memory: int = 0
    """Peak memory of the device in bytes."""
    tokens: tuple[int, ...] = ()
    """Tokens of each step, where they are counted."""

    @property
    def step_seconds(self) -> float:
        """The median step of the second half."""
        return median(self.seconds[len(self.seconds) // 2 :])

    @property
    def mean_loss(self) -> float:
        """Over all steps: equal for sides that train the same."""
        return mean(self.losses)

    @property
    def median_after_first(self) -> float:
        """The median step without the first one."""
        return median(self.seconds[1:] or self.seconds)

    def summary(self) -> dict[str, float]:
        """Memory and time to start, rounded."""
        return {"memory_gb": round(self.memory / 1e9, 2), "start_seconds": round(self.start, 1)}


def step_times(marks: list[float], losses: list[float], began: float, tokens: tuple[int, ...] = ()) -> StepTimes:
    """From the times when training began and each step ended."""
    from modelwright.engine.throughput import peak_memory_bytes

    seconds = [after - before for before, after in pairwise(marks)]
    return StepTimes(seconds, losses, marks[0] - began, marks[1] - began, peak_memory_bytes(), tokens)


def train_engine(
    engine: Any,
    steps: int,
    began: float,
    profile: KernelProfile = NOT_PROFILED,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """The steps of our engine."""
    marks, losses, tokens = [clock()], list[float](), list[int]()
    for report in profile.wrap(engine.steps(), steps):
        marks.append(clock())
        losses.append(report.loss)
        tokens.append(report.tokens)
    return step_times(marks, losses, began, tuple(tokens))


def train_peer(
    trainer: type, config: type, settings: dict[str, Any], began: float, clock: Callable[[], float] = now, **kwargs: Any
) -> tuple[StepTimes, Any]:
    """A trainer of Transformers or TRL: its times, and itself; `settings` go into its config, `kwargs` to it."""
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
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(output_dir=folder, **{**PEER_SETTINGS, **settings})
        instance = trainer(args=arguments, callbacks=[Clock()], **kwargs)
        instance.train()
    return step_times(marks, losses, began), instance


def make_engine(task: Any, settings: Any) -> Any:
    """Our engine on one device with the plan for its task."""
    from modelwright.engine.distributed import World
    from modelwright.engine.trainer import Engine
    from modelwright.plan.hardware import probe_device
    from modelwright.plan.stage import plan_stage

    plan = plan_stage(settings, task.rows, 1, probe_device())
    return Engine(task, settings, plan, World(device=torch_device()), SEED)


def torch_device() -> Any:
    """The device that trains."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    """The name of the device."""
    from modelwright.plan.hardware import probe_device

    return probe_device().name


def cpu_or_gpu_seconds() -> float:
    """Seconds: CPU time without a GPU, else wall time after the GPU is idle."""
    return now() if torch_device().type == "cuda" else time.process_time()


def in_engine_order(rows: Any, batch: int, steps: int) -> list[Any]:
    """Rows in the order in which our engine trains them."""
    from modelwright.data.sampler import GlobalBatchSampler

    order = GlobalBatchSampler(len(rows), batch, batch * steps, SEED)
    return [rows[row] for step in range(steps) for row in order.batch_indices(step)]


def conversation_dataset(conversations: list[Any]) -> Any:
    """Conversations as TRL reads them."""
    from datasets import Dataset

    messages = [each.messages for each in conversations]
    return Dataset.from_list([{"prompt": list(each[:-1]), "completion": list(each[-1:])} for each in messages])


FLAVOUR = "same shape as ours"
"""The name of our shape among those of its Llama."""


def train_torchtitan(workload: Workload, settings: dict[str, Any], rows: np.ndarray[Any, Any]) -> StepTimes:
    """torchtitan's own Trainer over our rows, from the same initial weights.

    settings: of torchtitan's JobConfig, by the names its command line has for them.
    """
    if installed("torchtitan") is None:
        raise UsageError("torchtitan is not installed")
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    began = time.perf_counter()
    marks: list[float] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder, _one_rank():
        register_train_spec(folder, titan_train_spec(workload, titan_batches(workload, rows), marks, losses))
        paths = {"job.dump_folder": folder, "model.name": folder}
        trainer = Trainer(titan_config(workload, {**paths, **settings}, len(rows)))
        copy_weights(trainer.model_parts[0], workload)
        free_device()
        marks.append(now())
        trainer.train()
        trainer.close()
    return step_times(marks, losses, began)


def titan_train_spec(workload: Workload, data: list[Any], marks: list[float], losses: list[float]) -> Any:
    """Its Llama in our shape with our rows; the time of each step goes to `marks`."""
    from dataclasses import replace

    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.llama3 import get_train_spec

    class Clock(MetricsProcessor):  # type: ignore[misc]
        def log(self, _: int, global_avg_loss: float, *__: Any, **___: Any) -> None:
            marks.append(now())
            losses.append(float(global_avg_loss))

    return replace(
        get_train_spec(), model_args={FLAVOUR: titan_shape(workload)}, build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: data, build_metrics_processor_fn=lambda job, dims, _: Clock(job, dims),
    )  # fmt: skip


def titan_shape(workload: Workload) -> Any:
    """The same Llama in torchtitan's terms; it rounds the MLP up to a multiple of `multiple_of`."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    return TransformerModelArgs(
        dim=workload.width, n_layers=workload.layers, n_heads=workload.heads, n_kv_heads=workload.key_heads,
        vocab_size=workload.vocab_size, multiple_of=workload.inner, ffn_dim_multiplier=0.5, norm_eps=1e-6,
        rope_theta=10_000, max_seq_len=workload.length, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )  # fmt: skip


def titan_config(workload: Workload, settings: dict[str, Any], rows: int) -> Any:
    """Its defaults, except for compiling, which it recommends, and what the other variants use too."""
    from torchtitan.config import JobConfig

    batch = workload.batch
    config = JobConfig()
    for name, value in {
        "model.flavor": FLAVOUR, "compile.enable": True, "debug.seed": SEED,
        "training.local_batch_size": workload.rows, "training.global_batch_size": batch,
        "training.seq_len": workload.length, "training.steps": rows // batch,
        "optimizer.lr": workload.learning_rate, "optimizer.beta2": 0.999, "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0,
        "metrics.log_freq": 1, "comm.trace_buf_size": 0, **settings,
    }.items():  # fmt: skip
        *sections, last = name.split(".")
        section: Any = config
        for name_part in sections:
            section = getattr(section, name_part)
        getattr(section, last)  # raises for a name that a later release no longer has
        setattr(section, last, value)
    return config


def titan_batches(workload: Workload, rows: np.ndarray[Any, Any]) -> list[Any]:
    """Micro-batches in our order, as its data loader gives them: tokens, and labels shifted by one."""
    import torch
    from torchtitan.components.loss import IGNORE_INDEX

    from modelwright.data.sampler import GlobalBatchSampler

    batch = workload.batch
    order = GlobalBatchSampler(len(rows), batch, len(rows), SEED)
    batches = []
    for step in range(len(rows) // batch):
        for micro in np.split(np.asarray(order.batch_indices(step)), workload.accumulation):
            tokens = torch.from_numpy(rows[micro])
            labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
            batches.append(({"input": tokens}, labels))
    return batches


def copy_weights(model: Any, workload: Workload) -> None:
    """Give its model the initial weights of ours."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    weights = Llama3StateDictAdapter(titan_shape(workload), None).from_hf(random_llama(workload).state_dict())
    set_model_state_dict(model, weights)


@contextmanager
def _one_rank() -> Iterator[None]:
    """A world of one as torchrun would make it; restores the environment and the garbage collection."""
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
        gc.enable()  # which its trainer disables
