"""torchtitan as a peer of benchmarks.speed: its own Trainer over our rows, from the weights that ours begins with.

Its model, compilation, loss, optimizer and loop are its own; the data loader and the writing of figures are what it
lets a user put in. Written for torchtitan 0.2.2, the release that suits torch 2.11.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.common import free_device, free_port, installed, now
from benchmarks.speed_works import SEED, Work, build
from modelwright.errors import UsageError

FLAVOUR = "same shape as ours"
"""What our shape is called among those of its Llama."""


def train(work: Work, settings: dict[str, Any], rows: np.ndarray[Any, Any]) -> tuple[list[float], list[float], float]:
    """When the training and each step ended, the loss of each step, and when all began.

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
        register_train_spec(place, specification(work, batches(work, rows), marks, losses))
        trainer = Trainer(configuration(work, {"job.dump_folder": place, "model.name": place, **settings}, len(rows)))
        begin_alike(trainer.model_parts[0], work)
        free_device()
        marks.append(now())
        trainer.train()
        trainer.close()
    return marks, losses, began


def specification(work: Work, data: list[Any], marks: list[float], losses: list[float]) -> Any:
    """Its Llama in our shape, fed with our rows, telling when each step has ended."""
    from dataclasses import replace

    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.llama3 import get_train_spec

    class Clock(MetricsProcessor):  # type: ignore[misc]
        def log(self, _: int, global_avg_loss: float, *__: Any, **___: Any) -> None:
            marks.append(now())
            losses.append(float(global_avg_loss))

    return replace(
        get_train_spec(), model_args={FLAVOUR: shape(work)}, build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: data, build_metrics_processor_fn=lambda job, dims, _: Clock(job, dims),
    )  # fmt: skip


def shape(work: Work) -> Any:
    """The same Llama in torchtitan's words; its feed-forward part is as wide as the next multiple of what is wanted."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    return TransformerModelArgs(
        dim=work.width, n_layers=work.layers, n_heads=work.heads, n_kv_heads=work.key_heads, vocab_size=work.words,
        multiple_of=work.inner, ffn_dim_multiplier=0.5, norm_eps=1e-6, rope_theta=10_000, max_seq_len=work.length,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )  # fmt: skip


def configuration(work: Work, settings: dict[str, Any], rows: int) -> Any:
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


def batches(work: Work, rows: np.ndarray[Any, Any]) -> list[Any]:
    """Micro-batches in our order, as its data loader gives them: tokens and, one place on, what follows them."""
    import torch
    from torchtitan.components.loss import IGNORE_INDEX

    from modelwright.data.stream import Order

    batch = work.rows * work.accumulation
    order = Order(len(rows), batch, len(rows), SEED)
    found = []
    for step in range(len(rows) // batch):
        for micro in np.split(np.asarray(order.at(step)), work.accumulation):
            tokens = torch.from_numpy(rows[micro])
            follows = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
            found.append(({"input": tokens}, follows))
    return found


def begin_alike(model: Any, work: Work) -> None:
    """Give its model the weights that ours has before the first step."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    weights = Llama3StateDictAdapter(shape(work), None).from_hf(build(work).state_dict())
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
