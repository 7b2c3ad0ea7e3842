"""The training loop: batches, forward and backward, gradient clipping, optimizer step, evaluation, checkpoint state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from modelwright.data.sampler import GlobalBatchSampler, rank_micro_batches
from modelwright.engine.checkpoint import LazyTensor, Snapshot, read_state, stored_tensors
from modelwright.engine.cuda_graphs import WARMUP_CALLS, GraphedCallable, GraphPool
from modelwright.engine.distributed import World
from modelwright.engine.fallback import CompiledLayers
from modelwright.engine.optimizer import EMA, build_optimizer, build_schedule
from modelwright.engine.parallel import distribute_like, full_tensor, parallelize, persistent_buffers, repeated_layers
from modelwright.engine.precision import (
    PARAM_REMAINDER,
    MixedPrecision,
    convert_to_fp8,
    deterministic_algorithms,
    disable_tf32_in_rope,
    join_fp32_master,
    nondeterministic_operation,
    set_fp8_scaling,
    split_fp32_master,
    to_bf16_with_remainders,
)
from modelwright.engine.spike_guard import SpikeGuard
from modelwright.engine.task import Cursor, MicroBatch, RankBatch, StepReport, Task, eval_metrics
from modelwright.engine.throughput import MIN_TIMEOUT_SECONDS, TIMEOUT_AFTER_STEPS, TIMEOUT_STEPS, DeviceTimer
from modelwright.errors import Refused, UsageError
from modelwright.plan.choose import uses_cuda_graphs
from modelwright.plan.stage import StagePlan
from modelwright.recipe.stage_specs import TrainingConfig

Result = TypeVar("Result")
MODEL_FILE, OPTIMIZER_FILE, EMA_FILE = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
TRIAL_MICRO_BATCHES, TRIAL_REPEATS = 2, 4
"""Micro-batches of a time trial, and how often each runs: about 12 s with 6 B parameters."""
MAX_COMPILE_STEPS = 8
"""Steps among which a micro-batch of other sizes is looked for to compile on."""


class Engine:
    """Trains one task on one rank."""

    def __init__(self, task: Task, settings: TrainingConfig, plan: StagePlan, world: World, seed: int) -> None:
        self.task, self.world, self.seed = task, world, seed
        self.plans = [plan]  # the last one is in force; the stage logs and drops the others
        self.notes: list[str] = []  # about the compile cache and CUDA graphs, for the user
        self.cursor = Cursor()
        batches = task.epoch_rows, plan.global_batch_size, plan.total_samples
        self.sampler = GlobalBatchSampler(*batches, seed, task.source_weights)
        task.set_total_steps(plan.steps)
        self._max_grad_norm = settings.max_grad_norm
        self._module = task.module.to(world.device)
        remainders = to_bf16_with_remainders(self._module) if plan.param_dtype == "bf16" else None
        if plan.tf32:
            disable_tf32_in_rope(self._module)
        self._fp8_linears = convert_to_fp8(self._module) if plan.precision == "fp8" else []
        self._compiles, self._computes_in = plan.torch_compile, ("", "")
        self.set_precision(plan.precision, plan.fp8_scaling)
        self._parallel_module = parallelize(
            self._module, world, plan.sharding, self.precision.compute_dtype, settings.ddp_bucket_cap_mb
        )
        self.trainable_params = {name: param for name, param in self._module.named_parameters() if param.requires_grad}
        self.buffers = persistent_buffers(self._module)
        self.optimizer = build_optimizer(self.trainable_params, settings, remainders)
        self._learning_rate = build_schedule(settings, plan)
        self.ema = EMA(self.saved_weights, settings.ema_decay)
        self.guard = SpikeGuard(settings.spike_factor)
        self.eval_rows: Sequence[int] = range(task.held_out_rows)
        self.on_evaluating: Callable[[float], None] = lambda fraction: None
        trained = sum(param.numel() for param in self.trainable_params.values())
        self._use_graphs = uses_cuda_graphs(settings.cuda_graphs, trained, plan, world.device.type == "cuda")
        self.reset_step_state()

    @property
    def plan(self) -> StagePlan:
        """The plan in force; `adopt` replaces it."""
        return self.plans[-1]

    def adopt(self, plan: StagePlan) -> None:
        """Follow a revised plan from the next micro-batch on; the stage writes it to the journal."""
        assert len(plan.reasons) > len(self.plan.reasons), "a revised plan says why"
        if (plan.precision, plan.fp8_scaling) != (self.plan.precision, self.plan.fp8_scaling):
            self.set_precision(plan.precision, plan.fp8_scaling)
        self.plans.append(plan)
        self.reset_step_state()

    def set_precision(self, precision: str, fp8_scaling: str) -> None:
        """Compute in this precision and FP8 scaling, the plan's or that of a trial; an fp8 model can do bf16 too."""
        if self._computes_in == (precision, fp8_scaling):
            return
        self._computes_in = precision, fp8_scaling
        set_fp8_scaling(self._fp8_linears, fp8_scaling if precision == "fp8" else None)
        device = self.world.device
        self.precision = MixedPrecision(precision, device, self.plan.param_dtype, self.plan.tf32, fp8_scaling)
        # uncompiled fp8 layers cast in separate passes: a DPO step takes 0.85 s, 0.28 s in bf16
        should_compile = self._compiles or (precision == "fp8" and device.type == "cuda")
        layers = repeated_layers(self._module) or [self._module]
        self._compiled = CompiledLayers(layers, self.notes.append, should_compile, self.plan.deterministic)
        self.must_compile = should_compile

    def reset_step_state(self) -> None:
        """Drop the prefetched batch and the CUDA graphs: parameters and optimizer state may have been replaced.

        A step has four parts, each eager or graphed: the first micro-batch, which creates the gradients, the following
        ones, which accumulate, clipping, and the optimizer step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self._prefetched: RankBatch | None = None
        self._compute_timer, self._data_wait_timer = (DeviceTimer(self.world.device) for _ in range(2))
        self._first_step = 0
        pool = GraphPool(list(self.trainable_params.values()))
        graphed = partial(GraphedCallable, pool=pool, log=self.notes.append)
        self._first_backward = graphed(self._forward_backward, creates_gradients=True)
        self._next_backward = graphed(self._forward_backward)
        prepare = partial(self.optimizer.prepare_step, static_grads=True)
        self._clip, self._update = (
            graphed(part, before_capture=prepare) for part in (self._clip_grads, self._optimizer_step)
        )
        if self._use_graphs:
            self.optimizer.make_capturable(self.world.device)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run steps without CUDA graphs inside, so that a profiler sees every operation."""
        use_graphs, self._use_graphs = self._use_graphs, False
        try:
            yield
        finally:
            self._use_graphs = use_graphs

    def steps(self, stop_requested: Callable[[], bool] = lambda: False) -> Iterator[StepReport]:
        """Train to the end of the plan; yields a report after every step."""
        self._first_step = self.cursor.step
        self.compile_layers()
        self._module.train()
        while self.cursor.step < self.plan.steps:
            yield self._step(stop_requested())

    @torch.enable_grad()
    def compile_layers(self) -> None:
        """Compile on micro-batches of the first steps, whichever step the run continues at; once, if the plan compiles.

        torch compiles with the first sizes that it sees in mind, and the order in which a kernel adds depends on them:
        a resumed run must see the same ones first (engine rule 8).
        """
        if not self.must_compile:
            return
        self.must_compile = False
        torch._dynamo.reset()  # it remembers the sizes of reference log-probs, which a resumed run does not compute
        self.world.heartbeat.set_phase("compiling")
        self._module.train()
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        with self.eager(), torch.random.fork_rng(devices=self._gpus):
            self.with_fallback(self._run_first_shapes)
            wrong = self.with_fallback(self._check_compiled_layers)
        for name, buffer in buffers.items():
            self.buffers[name].copy_(buffer)
        self.reset_step_state()
        if wrong:
            self.adopt(self.plan.revise(wrong))

    def _check_compiled_layers(self) -> str | None:
        """Compare compiled with eager gradients on the first micro-batch; what was done about a difference."""
        inputs = self._prepare(0).micro_batches[0].inputs_on(self.world.device)
        try:
            return self._compiled.run_eagerly_if_wrong(lambda: self._parallel_module(**inputs), self.forward_context)
        except torch.OutOfMemoryError:
            return "compiled gradients were not compared with eager ones: not enough memory"

    def _run_first_shapes(self) -> None:
        """Forward and backward of the first micro-batch and of the one whose shapes differ most from it."""
        steps = range(min(self.plan.steps, MAX_COMPILE_STEPS))
        micro_batches = (each for step in steps for each in self._prepare(step).micro_batches)
        first = other = next(micro_batches)

        def num_differences(micro_batch: MicroBatch) -> int:
            pairs = zip_longest(chain(*micro_batch.shapes), chain(*first.shapes))
            return sum(size != before for size, before in pairs)

        for micro_batch in micro_batches:  # one by one: they may hold the states of cached layers
            if not micro_batch.is_short and num_differences(micro_batch) > num_differences(other):
                other = micro_batch
        with self._compiled_for_sizes((first, other)):
            for micro_batch in (first, other):  # as many on every rank
                self._accumulate([micro_batch], max(1, micro_batch.trained_tokens))

    def _compiled_for_sizes(self, micro_batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """What compiles inside is compiled for any of the sizes that differ between these micro-batches."""
        runs = [partial(self._parallel_module, **each.inputs_on(self.world.device)) for each in micro_batches]
        return self._compiled.mark_varying_sizes(runs, self.forward_context)

    def _step(self, stop_requested: bool) -> StepReport:
        began = time.perf_counter()
        step, learning_rate = self.cursor.step, self._learning_rate(self.cursor.step)
        rank_batch = self._rank_batch(step)
        counts = (rank_batch.tokens, rank_batch.trained_tokens, stop_requested)
        tokens, trained_tokens, stop_votes = self.world.all_reduce_sum(*counts)
        if not self._module.training:  # train() over all submodules takes 0.8 ms of host time
            self._module.train()
        self.world.heartbeat.set_phase("training step")
        self._compute_timer.start()
        sums = self.with_fallback(lambda: self._accumulate(self._rank_batch(step).micro_batches, trained_tokens))
        self.precision.scaler.unscale_(self.optimizer)
        sums_and_norm = self._clip(self._first_backward.replayed, sums=sums)
        self._data_wait_timer.start()
        self._prefetched = self._prepare(step + 1)  # while the device is still computing
        self._data_wait_timer.stop()
        self.optimizer.set_learning_rate(learning_rate)
        *rank_sums, grad_norm = sums_and_norm.tolist()  # the only synchronization with the device in a step
        seconds_by_rank = self._compute_timer.seconds_by_rank(self.world.rank, self.world.size)
        totals = self.world.all_reduce_sum(*rank_sums, *seconds_by_rank)
        loss, *others = (total / trained_tokens for total in totals[: len(rank_sums)])
        health = self.guard.check(loss, grad_norm, self.precision.can_lower_loss_scale)
        if health == "ok":
            self._update(self._first_backward.replayed)
            self.ema.update(step)
        if not self._first_backward.replayed:
            self.optimizer.zero_grad(set_to_none=True)
        self.precision.scaler.update()
        previous, seconds = self.cursor, time.perf_counter() - began
        self.world.heartbeat.step_done(step + 1, seconds)
        if step - self._first_step == TIMEOUT_AFTER_STEPS:
            self.world.set_collective_timeout(max(MIN_TIMEOUT_SECONDS, TIMEOUT_STEPS * seconds))
        self.cursor = Cursor(step + 1, previous.tokens + int(tokens), previous.trained_tokens + int(trained_tokens))
        return StepReport(
            step=step + 1,
            epoch=self.sampler.epoch_at(step + 1),
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens=int(tokens),
            batch_hash=rank_batch.rows_hash,
            step_seconds=seconds,
            data_wait_seconds=self._data_wait_timer.seconds,
            compute_seconds_by_rank=tuple(totals[len(rank_sums) :]),
            health=health,
            stop_requested=stop_votes > 0,
            metrics=dict(zip(self.task.metric_names[1:], others, strict=False)),
        )

    def _rank_batch(self, step: int) -> RankBatch:
        """This rank's micro-batches of a global batch, prefetched where possible."""
        if self._prefetched is None or self._prefetched.step != step:
            self._prefetched = self._prepare(step)
        return self._prefetched

    def _prepare(self, step: int) -> RankBatch:
        rows = self.sampler.batch_indices(step)
        rows_hash = xxhash.xxh3_64_hexdigest(np.sort(rows).astype(np.int64).tobytes())
        self.task.set_global_batch(rows)
        full = self.plan.micro_batch_size if len(rows) < self.plan.global_batch_size else 0
        micro_batches = [
            replace(self.task.batch(row_numbers, step), is_short=len(row_numbers) < full)
            for row_numbers in self._micro_batch_rows(rows)
        ]
        return RankBatch(step, rows_hash, [batch.to_device(self.world.device) for batch in micro_batches])

    def _micro_batch_rows(self, rows: Sequence[int]) -> list[list[int]]:
        """Row numbers of this rank's micro-batches of a global batch; similar lengths together save padding."""
        rows = sorted(rows, key=self.task.row_length)
        if self.task.padding_free:  # instead, as many tokens in each
            count = -(-len(rows) // (self.plan.micro_batch_size * self.world.size)) * self.world.size
            return [rows[first::count] for first in range(self.world.rank, count, self.world.size)]
        return rank_micro_batches(rows, self.world.rank, self.world.size, self.plan.micro_batch_size)

    def with_fallback(self, step_fn: Callable[[], Result]) -> Result:
        """Run a function; after an error that another plan avoids, adopt that plan and run it again."""
        while True:
            try:
                return step_fn()
            except Exception as error:
                if (revised := self._fallback_for(error)) is None:
                    raise
            self.adopt(revised)  # not inside except: the traceback holds the failed step's tensors

    def _fallback_for(self, error: Exception) -> StagePlan | None:
        """The plan to go on with after an error; None if there is none, or with several ranks."""
        if operation := nondeterministic_operation(error):
            reason = f"{operation} has no deterministic kernel"
            if self.world.size > 1:
                raise UsageError(f"{reason}; deterministic: false trains, with other bits in each run") from None
            return self.plan.revise(f"{reason}: this run cannot be repeated bit for bit", deterministic=False)
        if self.world.size > 1:
            return None
        if isinstance(error, torch.OutOfMemoryError):
            return self.plan.halve_micro_batch(self._module.training)
        message = self._compiled.fallback_for(error)
        return self.plan.revise(message) if message else None

    def _accumulate(self, micro_batches: Sequence[MicroBatch], trained_tokens: float) -> Tensor:
        """Accumulate the gradients of a step; returns this rank's summed metrics, the loss first, on the device."""
        sums: Tensor | None = None
        # gradients are averaged over ranks: world size / global token count gives the mean over the global batch
        scale = torch.full((), self.world.size / trained_tokens, device=self.world.device)
        for micro_step, micro_batch in enumerate(micro_batches):
            self._seed_micro_batch(micro_step)
            with gradient_sync(self._parallel_module, enabled=micro_step == len(micro_batches) - 1):
                inputs = {"scale": scale, **micro_batch.inputs_on(self.world.device)}
                micro_sums = self._run_micro_batch(micro_step, micro_batch.is_short, inputs).float()
            sums = micro_sums if sums is None else sums + micro_sums
        assert sums is not None
        return sums

    def _run_micro_batch(self, micro_step: int, is_short: bool, inputs: dict[str, Tensor]) -> Tensor:
        """One micro-batch, eager or replayed: the first of a step creates the gradients, the others accumulate.

        A short one is neither compiled nor captured: the layers would be compiled again for it alone, 6.6 s of
        llama-7b's dpo at an eighth of its width (H200, 2026-11-18). Ranks could not halve it if its memory did not fit.
        """
        with self._compiled.eager() if is_short and self.world.size == 1 else nullcontext():
            if micro_step == 0:
                return self._first_backward(self._use_graphs and not is_short, **inputs)
            return self._next_backward(self._first_backward.replayed and not is_short, **inputs)

    def _forward_backward(self, scale: Tensor, **inputs: Tensor) -> Tensor:
        """Forward and backward of one micro-batch; returns its summed metrics, the loss first."""
        with deterministic_algorithms(self.plan.deterministic):
            with self.precision.autocast():
                sums: Tensor = self._parallel_module(**inputs).flatten()
            if self.world.size > 1:
                self._compute_timer.stop()  # after the last of these, fast ranks wait for slow ones in all_reduce
            self.precision.backward(sums[0] * scale)
        return sums.detach()

    @property
    def _gpus(self) -> list[int]:
        """The number of this rank's GPU, if it has one."""
        return [self.world.device.index or 0] if self.world.device.type == "cuda" else []

    def time_trial(self) -> tuple[list[float], float]:
        """Run forward and backward on the first micro-batches without an update: summed metrics, best seconds."""
        return self.with_fallback(self._run_time_trial)

    def _run_time_trial(self) -> tuple[list[float], float]:
        micro_batch_rows = self._micro_batch_rows(self.sampler.batch_indices(0))[:TRIAL_MICRO_BATCHES]
        micro_batches = [self.task.time_trial_batch(row_numbers) for row_numbers in micro_batch_rows]
        trained_tokens = max(1, sum(micro_batch.trained_tokens for micro_batch in micro_batches))
        self._module.train()
        seconds, gpus = [], self._gpus
        with torch.random.fork_rng(devices=gpus):
            for _ in range(TRIAL_REPEATS + WARMUP_CALLS * self._use_graphs):
                began = time.perf_counter()
                sums = self._accumulate(micro_batches, trained_tokens)
                for gpu in gpus:
                    torch.cuda.synchronize(gpu)
                seconds.append(time.perf_counter() - began)
        self.reset_step_state()
        return sums.tolist(), min(seconds)

    def _clip_grads(self, sums: Tensor) -> Tensor:
        """Clip the gradients, or set the factor they are read with; returns [*summed metrics, gradient norm]."""
        grad_norm = self.optimizer.clip_grad_norm(self._max_grad_norm or float("inf"))
        return torch.cat((sums.double(), grad_norm.double().view(1)))

    def _optimizer_step(self) -> Tensor:
        self.precision.scaler.step(self.optimizer)
        return next(iter(self.trainable_params.values()))

    def _seed_micro_batch(self, micro_step: int) -> None:
        """Seed dropout by (seed, step, index of the micro-batch in the global batch), for any world size."""
        micro_batch_index = micro_step * self.world.size + self.world.rank
        key = f"{self.seed}:{self.cursor.step}:{micro_batch_index}"
        self.world.manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)

    @torch.no_grad()
    def evaluate(self, stop_requested: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Metrics of the task, averaged over eval_rows: eval_loss and others by name; None if stopped."""
        self.compile_layers()
        self._module.eval()
        with self.ema.swap(), self._compiled.eager():
            rank_sums = self.with_fallback(lambda: self._held_out_sums(stop_requested))
        if rank_sums is None:
            return None
        values = self.world.all_reduce_sum(*rank_sums.flatten().tolist())
        by_source = torch.tensor(values, dtype=torch.float64).view(rank_sums.shape)
        metrics = self._eval_metrics(by_source.sum(0))
        for name, totals in zip(self.task.held_out_sources, by_source, strict=False):
            metrics |= {f"{metric}.{name}": value for metric, value in self._eval_metrics(totals).items()}
        return metrics

    def _eval_metrics(self, totals: Tensor) -> dict[str, float]:
        """The metrics of sums and trained tokens, [metrics + 1]; none where nothing was evaluated."""
        *sums, count = totals.tolist()
        return eval_metrics(dict(zip(self.task.metric_names, sums, strict=True)), count) if count else {}

    def _held_out_sums(self, stop_requested: Callable[[], bool]) -> Tensor | None:
        """Sums over this rank's part of eval_rows: [sources, metrics and trained tokens]; None if stopped."""
        ends = np.cumsum([*self.task.held_out_sources.values()] or [self.task.held_out_rows])
        source_of, eval_rows = np.searchsorted(ends, self.eval_rows, side="right"), np.asarray(self.eval_rows)
        batches = [(source, rows) for source in range(len(ends)) for rows in rank_micro_batches(
            eval_rows[source_of == source].tolist(), self.world.rank, self.world.size, self.plan.eval_micro_batch_size
        )]  # fmt: skip
        sums = torch.zeros(len(ends), len(self.task.metric_names), device=self.world.device)
        trained_tokens = torch.zeros(len(ends), 1, dtype=torch.float64)
        for number, (source, rows) in enumerate(batches):
            self.world.heartbeat.set_phase("evaluating")
            self.on_evaluating(number / len(batches))
            if any(self.world.all_reduce_sum(stop_requested())):  # all ranks stop at the same batch
                return None
            micro_batch = self.task.held_out_batch(rows)
            sums[source] += self._forward(micro_batch).flatten()
            trained_tokens[source] += micro_batch.trained_tokens
        return torch.cat([sums.double().cpu(), trained_tokens], dim=1)

    @torch.no_grad()
    def predict(self, micro_batches: Iterable[MicroBatch], extremes: Sequence[MicroBatch] = ()) -> Iterator[Tensor]:
        """Outputs of the module for batches, on the CPU; every rank must pass the same number of batches.

        extremes: those whose sizes differ most, so that the layers are compiled once for all.
        """
        self._module.eval()
        with self._compiled_for_sizes(extremes):
            for micro_batch in micro_batches:
                yield self._forward(micro_batch).float().cpu()

    def summed_output(self, micro_batch: MicroBatch) -> float:
        """The sum of the module's outputs for a batch, uncompiled, as a model that is loaded computes them."""
        with self._compiled.eager():
            return float(next(self.predict([micro_batch])).sum())

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """What a forward pass runs in: autocast, and deterministic kernels where the plan has them."""
        with deterministic_algorithms(self.plan.deterministic), self.precision.autocast():
            yield

    def _forward(self, micro_batch: MicroBatch) -> Tensor:
        with self.forward_context():
            output: Tensor = self._parallel_module(**micro_batch.inputs_on(self.world.device))
        return output

    def state_dict(self, **extra_state: Any) -> Snapshot:
        """All that resuming needs: trainable parameters, buffers, optimizer, EMA, cursor, spike guard, loss scaler."""
        state = {
            "cursor": asdict(self.cursor),
            "seed": self.seed,
            "guard": self.guard.state_dict(),
            "precision": self.precision.scaler.state_dict(),
            **extra_state,
        }
        tensors: dict[str, dict[str, Tensor]] = {
            MODEL_FILE: self.saved_weights,
            OPTIMIZER_FILE: self.optimizer.state_tensors(),
        }
        if self.ema.shadow:
            tensors[EMA_FILE] = self.ema.shadow
        files = {file: [_lazy_tensor(*item) for item in content.items()] for file, content in tensors.items()}
        return Snapshot(self.cursor.step, state, files)

    @property
    def saved_weights(self) -> dict[str, Tensor]:
        """The weights in a checkpoint: trainable parameters and buffers."""
        return {**self.trainable_params, **self.buffers}

    def load_state_dict(self, folder: Path) -> dict[str, Any]:
        """Resume from a verified checkpoint; returns its plain values, the extra state among them."""
        state = read_state(folder)
        remainders = self.load_weights(folder)
        stored = stored_tensors(folder, OPTIMIZER_FILE)
        moments = ((key, read()) for key, read in stored.items() if not key.endswith(PARAM_REMAINDER))
        self.optimizer.load_state_tensors(chain(moments, remainders.items()))
        self.guard.load_state_dict(state["guard"])
        if state["precision"]:  # another precision than fp16 has no loss scale
            self.precision.scaler.load_state_dict(state["precision"])
        self.cursor = Cursor(**state["cursor"])
        self.reset_step_state()
        return state

    @torch.no_grad()
    def load_weights(self, folder: Path) -> dict[str, Tensor]:
        """Load parameters, buffers and EMA of a bf16 or fp32 checkpoint; returns the remainders of bf16 parameters."""
        remainders: dict[str, Tensor] = {}
        stored, optimizer = stored_tensors(folder, MODEL_FILE), stored_tensors(folder, OPTIMIZER_FILE)
        for name, tensor in self.saved_weights.items():
            value = stored[name]()
            if (key := f"{name}.{PARAM_REMAINDER}") in optimizer:
                value = join_fp32_master(value, optimizer[key]())
            if tensor.dtype is torch.bfloat16 and value.dtype is torch.float32:
                value, remainders[key] = split_fp32_master(value)
            tensor.copy_(distribute_like(value, tensor))
        if self.ema.shadow:
            averages = stored_tensors(folder, EMA_FILE)
            for name, shadow in self.ema.shadow.items():
                shadow.copy_(distribute_like(averages[name](), shadow))
        return remainders


@contextmanager
def explain_mismatch(folder: Path) -> Iterator[None]:
    """Turn errors of loading a valid checkpoint of another stage or version into one clear message."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise Refused(
            f"checkpoint {folder} is valid, but not of this stage ({reason}); delete it, or choose another output_dir"
        ) from None


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Let DDP and FSDP2 reduce gradients only if enabled: in the last micro-batch of a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    context: Any = module.no_sync() if isinstance(module, DistributedDataParallel) and not enabled else nullcontext()
    with context:
        yield


def _lazy_tensor(name: str, tensor: Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(tensor.shape), tensor.dtype, lambda: full_tensor(tensor))
