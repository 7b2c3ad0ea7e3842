"""The one loop: take a global batch, add up its gradients, judge, move the weights, tell the caller.

    for report in engine.steps():
        ...          # the caller decides about logging, measuring, saving and stopping

The loss is summed over trained tokens and divided by their count over all ranks and micro-batches, so that
accumulation equals a large batch and two ranks equal one. Random numbers are a function of seed, step and
micro-batch, so that a resumed run draws what the uninterrupted one would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from modelwright.data.stream import order_of, share
from modelwright.engine.fp8 import convert, switch
from modelwright.engine.average import Average
from modelwright.engine.guard import Guard, is_bad
from modelwright.engine.masters import SplitAdamW, halve
from modelwright.engine.optim import build_optimizer, build_schedule, get_ready, set_learning_rate, shorten
from modelwright.engine.pace import HANGS_SECONDS, KNOWN_AFTER, TIMES_A_STEP, Stopwatch
from modelwright.engine.precision import Precision, keep_angles_exact
from modelwright.engine.replay import WARM_UP, Replay, is_worth_recording
from modelwright.engine.retreat import Compiled, smaller_bites
from modelwright.engine.shard import accumulating, layers_of, persistent_buffers, place, shard
from modelwright.engine.step import Cursor, StepReport
from modelwright.engine.task import Batch, Coming, Prepared, Task, means, sent
from modelwright.engine.world import World
from modelwright.plan.stage import StagePlan
from modelwright.recipe.training import Training

Result = TypeVar("Result")
REHEARSED, TIMES = 2, 4
"""Micro-batches that are gone through where nothing is learnt yet, and how often: about 12 s with 6 B weights."""


class Engine:
    """Trains one task on this rank's share of the world."""

    def __init__(self, task: Task, settings: Training, plan: StagePlan, world: World, seed: int) -> None:
        self.task, self.plan, self.world = task, plan, world
        self.cursor = Cursor()
        self.order = order_of(task, (plan.rows, plan.global_batch, plan.total_rows, seed))
        self.seed = seed
        self.changes: list[str] = []
        self._clip = settings.max_grad_norm
        self.eval_rows = settings.per_device_eval_batch_size
        self._module = task.module.to(world.device)
        rests = halve(self._module) if plan.weights == "bf16" else None
        if plan.tf32:
            keep_angles_exact(self._module)
        self._eighths = convert(self._module) if plan.precision == "fp8" else []
        self._compiles = settings.torch_compile
        self.compute_in(plan.precision, plan.scaling)
        self._forward = shard(self._module, world, plan.sharding, self.precision.compute, settings.ddp_bucket_cap_mb)
        self.weights = {name: w for name, w in self._module.named_parameters() if w.requires_grad}
        self.buffers = persistent_buffers(self._module)
        self.optimizer = build_optimizer(self._module, settings, self._beside_weights(rests))
        self._judged = self.optimizer if world.size == 1 and isinstance(self.optimizer, SplitAdamW) else None
        self._learning_rate = build_schedule(settings, plan)
        self.average = Average({**self.weights, **self.buffers}, settings.ema_decay)
        self.guard = Guard(settings.spike_factor)
        # fsdp lays its weights out anew each time: a recording would read where they were
        alone = world.size == 1 and not isinstance(self._forward, FSDPModule)
        self._records = world.device.type == "cuda" and alone and plan.precision != "fp16"
        self._records = self._records and is_worth_recording(self._module, settings.cuda_graphs)
        self.begin_anew()

    def compute_in(self, precision: str, scaling: str) -> None:
        """Use this arithmetic from now on; what was built in fp8 can compute in bf16 too, and nothing else changes."""
        switch(self._eighths, scaling if precision == "fp8" else None)
        self.precision = Precision(precision, self.world.device, self.plan.weights, self.plan.tf32, scaling)
        if (precision, scaling) != (self.plan.precision, self.plan.scaling):
            self.plan = replace(self.plan, precision=precision, scaling=scaling)
        # as they are, fp8 layers cast in passes of their own: 0.85 s a step of DPO where bf16 takes 0.28
        compiles = self._compiles or (precision == "fp8" and self.world.device.type == "cuda")
        self._compiled = Compiled(layers_of(self._module) or [self._module], self.changes.append, compiles)

    def begin_anew(self) -> None:
        """Forget what was prepared or recorded: weights and moments may have been replaced.

        Recorded or not, a step has four parts: the first micro-batch, whose gradients are new, those that add to them,
        their length, and the move. Each recording of the first has gradients of its own, which the others read.
        """
        self._clear_gradients()
        self._ahead: Prepared | None = None
        self._scale: tuple[float, Tensor] | None = None
        self._watch, self._idle, self._first_step = Stopwatch(self.world.device), Stopwatch(self.world.device), 0
        self._first = Replay(self._micro_batch, list(self.weights.values()))
        self._more = Replay(self._micro_batch)
        self._length, self._move = (
            Replay(part, ready=lambda: get_ready(self.optimizer)) for part in (self._clipped, self._moved)
        )
        if self._records:
            for group in self.optimizer.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.world.device)
                group["capturable"] = True

    @contextmanager
    def as_it_comes(self) -> Iterator[None]:
        """Inside, steps are computed and not replayed, so that what they do can be watched."""
        records, self._records = self._records, False
        try:
            yield
        finally:
            self._records = records

    def _beside_weights(self, rests: dict[str, Tensor] | None) -> dict[Tensor, Tensor] | None:
        """What bf16 weights have lost of their masters, laid out as they are."""
        if rests is None:
            return None
        return {self.weights[name]: place(rest, self.weights[name]) for name, rest in rests.items()}

    def steps(self, stop_asked: Callable[[], bool] = lambda: False) -> Iterator[StepReport]:
        """Train to the end of the plan, telling the caller about every step."""
        self._first_step = self.cursor.step
        self._module.train()
        while self.cursor.step < self.plan.steps:
            yield self._step(stop_asked())

    def _step(self, stop_asked: bool) -> StepReport:
        began = time.perf_counter()
        step, learning_rate = self.cursor.step, self._learning_rate(self.cursor.step)
        now = self._share_of(step)
        tokens, trained, stops = self.world.sum(now.tokens, now.trained, stop_asked)
        if not self._module.training:  # asking each part again takes 0.8 ms, in which the device may stand still
            self._module.train()
        self.world.beat.at("computing")
        self._watch.start()
        total = self._or_otherwise(lambda: self._accumulate(self._share_of(step).batches, trained))
        self.precision.unscale(self.optimizer)
        limits = torch.tensor((trained, *self.guard.limits()), dtype=torch.float64)
        told = self._length.behind(self._first.last, summed=total, limits=sent(limits, self.world.device))
        self._idle.start()
        self._ahead = self._prepare(step + 1)  # while the device is still at work
        self._idle.stop()
        set_learning_rate(self.optimizer, learning_rate)
        coming = Coming(told)
        if self._judged is not None:  # the device knows whether it may
            self._move.behind(self._first.last)
        summed, norm = coming()  # the one moment that waits for the device
        loss, *alone = self.world.sum(summed, *self._watch.in_my_place(self.world.rank, self.world.size))
        loss /= trained
        health = self.guard.judge(loss, norm, self.precision.overflows_are_normal)
        if health == "ok" and self._judged is None:
            self._move.behind(self._first.last)
        if health == "ok":
            self.average.follow(step)
        if self._first.last is None:
            self._clear_gradients()
        self.precision.update()
        before, seconds = self.cursor, time.perf_counter() - began
        self.world.beat.stepped(step + 1, seconds)
        if step - self._first_step == KNOWN_AFTER:
            self.world.wait_at_most(max(HANGS_SECONDS, TIMES_A_STEP * seconds))
        self.cursor = Cursor(step + 1, before.tokens + int(tokens), before.trained_tokens + int(trained))
        return StepReport(
            step=step + 1,
            epoch=self.order.epoch(step + 1),
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            tokens=int(tokens),
            batch=now.rows_hash,
            seconds=seconds,
            waited=self._idle.seconds,
            seconds_alone=tuple(alone),
            health=health,
            stop_asked=stops > 0,
        )

    def _share_of(self, step: int) -> Prepared:
        """This rank's share of a global batch, prepared ahead where it was."""
        if self._ahead is None or self._ahead.step != step:
            self._ahead = self._prepare(step)
        return self._ahead

    def _prepare(self, step: int) -> Prepared:
        """This rank's share of a global batch; rows of like length share a micro-batch."""
        rows = sorted(self.order.at(step), key=self.task.length)
        mine = share(rows, self.world.rank, self.world.size, self.plan.per_device)
        rows_hash = xxhash.xxh3_64_hexdigest(np.sort(rows).astype(np.int64).tobytes())
        return Prepared(step, rows_hash, [self.task.batch(some, step).sent(self.world.device) for some in mine])

    def _or_otherwise(self, work: Callable[[], Result]) -> Result:
        """Do work, if need be otherwise than planned; `changes` tells how."""
        while True:
            try:
                return work()
            except Exception as error:
                if (told := self._retreat(error)) is None:
                    raise
                self.changes.append(told)
            self.begin_anew()

    def _retreat(self, error: Exception) -> str | None:
        """Another way to the same step, where there is one; ranks among others keep to what was agreed."""
        if self.world.size > 1:
            return None
        if not isinstance(error, torch.OutOfMemoryError):
            return self._compiled.retreat(error)
        if not self._module.training and self.eval_rows > 1:
            self.eval_rows //= 2
            return f"{2 * self.eval_rows} rows at once do not fit the memory; {self.eval_rows} are measured at once"
        if (smaller := smaller_bites(self.plan)) is None or not self._module.training:
            return None
        told = f"{self.plan.per_device} rows at once do not fit the memory; {smaller.arithmetic} keeps the batch"
        self.plan = smaller
        return told

    def _accumulate(self, batches: Sequence[Batch], trained: float) -> Tensor:
        """Add up the gradients of a step; returns this rank's summed loss, still on the device."""
        total: Tensor | None = None
        # ranks average their gradients: times the size, over the count, makes that the global mean
        scale = self._on_device(self.world.size / trained)
        for turn, batch in enumerate(batches):
            self._draw_for(turn)
            with accumulating(self._forward, last=turn == len(batches) - 1):
                summed = self._micro(turn, scale=scale, **batch.on(self.world.device))[0].float()
            total = summed if total is None else total + summed
        assert total is not None
        return total

    def _on_device(self, scale: float) -> Tensor:
        """The number where the gradients are; it is mostly the one of the step before."""
        if self._scale is None or self._scale[0] != scale:
            self._scale = (scale, torch.full((), scale, device=self.world.device))
        return self._scale[1]

    def _micro(self, turn: int, **inputs: Tensor) -> Tensor:
        """One micro-batch, computed or replayed: the first of a step makes the gradients, the others add to them."""
        if turn == 0:
            return self._first.behind(() if self._records else None, **inputs)
        return self._more.behind(self._first.last, **inputs)

    def _micro_batch(self, scale: Tensor, **inputs: Tensor) -> Tensor:
        """Add one micro-batch to the gradients; returns its summed measures, the loss first."""
        with self.precision.autocast():
            summed: Tensor = self._forward(**inputs).flatten()
        if self.world.size > 1:
            self._watch.stop()  # from the last of these on gradients are exchanged, and the fast wait for the slow
        self.precision.backward(summed[0] * scale)
        return summed.detach()

    def rehearse(self) -> tuple[list[float], float]:
        """Go forward and back over the first batches and move nothing: their summed measures, the fastest's seconds."""
        return self._or_otherwise(self._rehearsed)

    def _rehearsed(self) -> tuple[list[float], float]:
        rows = sorted(self.order.at(0), key=self.task.length)
        mine = share(rows, self.world.rank, self.world.size, self.plan.per_device)
        lay_out = getattr(self.task, "trial_batch", self.task.batch)
        batches = [lay_out(some, 0) for some in mine[:REHEARSED]]
        scale = torch.full((), 1 / max(1, sum(batch.trained for batch in batches)), device=self.world.device)
        self._module.train()
        seconds, gpus = [], [self.world.device.index or 0] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            for _ in range(TIMES + WARM_UP * self._records):
                began = time.perf_counter()
                summed = torch.zeros(len(self.task.measures), device=self.world.device)
                for turn, batch in enumerate(batches):
                    self._draw_for(turn)
                    with accumulating(self._forward, last=True):
                        summed += self._micro(turn, scale=scale, **batch.on(self.world.device))
                for gpu in gpus:
                    torch.cuda.synchronize(gpu)
                seconds.append(time.perf_counter() - began)
        self.begin_anew()
        return summed.tolist(), min(seconds)

    def _clipped(self, summed: Tensor, limits: Tensor) -> Tensor:
        """Shorten the gradient where it is too long, or as it is read; returns the summed loss and how long it was."""
        length = shorten(self.optimizer, list(self.weights.values()), self._clip or float("inf"))
        told = torch.stack((summed, length)).double()
        if self._judged is not None:
            self._judged.stay_if(is_bad(told[0], told[1], limits))
        return told

    def _moved(self) -> Tensor:
        """Move the weights."""
        self.precision.step(self.optimizer)
        return next(iter(self.weights.values()))

    def _clear_gradients(self) -> None:
        """Let go of them; a recording's own are written anew in their places, and are left there between its steps."""
        self.optimizer.zero_grad(set_to_none=True)

    def _draw_for(self, turn: int) -> None:
        """Seed the random numbers of one micro-batch by its place in the run, whatever the world's size."""
        place = turn * self.world.size + self.world.rank
        self.world.draw_from(xxhash.xxh3_64_intdigest(f"{self.seed}:{self.cursor.step}:{place}".encode()) >> 1)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """What the task measures, as means over everything held out: eval_loss, and others by their name."""
        self._module.eval()
        with self.average.shown():
            summed, trained = self._or_otherwise(self._held_out_sums)
        *sums, count = self.world.sum(*summed.tolist(), trained)
        return means(dict(zip(self.task.measures, sums, strict=True)), count)

    def _held_out_sums(self) -> tuple[Tensor, int]:
        """This rank's share of what is held out: [measures], and how much was measured."""
        summed, trained = torch.zeros(len(self.task.measures), device=self.world.device), 0
        for rows in share(range(self.task.held_out_rows), self.world.rank, self.world.size, self.eval_rows):
            self.world.beat.at("measuring")
            batch = self.task.held_out_batch(rows)
            with self.precision.autocast():
                summed += self._forward(**batch.on(self.world.device)).flatten()
            trained += batch.trained
        return summed, trained

    @torch.no_grad()
    def look(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """What the module gives for batches, on the CPU, without learning from them; every rank looks as often."""
        self._module.eval()
        for batch in batches:
            with self.precision.autocast():
                yield self._forward(**batch.on(self.world.device)).float().cpu()
