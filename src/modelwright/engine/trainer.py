"""The training loop: batches, forward and backward, gradient clipping, the optimizer step, evaluation, and the engine's checkpoint state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from modelwright.data.sampler import build_sampler, rank_micro_batches
from modelwright.engine.bf16_adamw import (
    PARAM_REMAINDER,
    BF16AdamW,
    join_fp32_master,
    split_fp32_master,
    to_bf16_with_remainders,
)
from modelwright.engine.checkpoint import LazyTensor, Snapshot, read_state
from modelwright.engine.cuda_graphs import WARMUP_CALLS, GraphedCallable, use_cuda_graphs
from modelwright.engine.distributed import World
from modelwright.engine.fallback import CompiledLayers, halve_micro_batch
from modelwright.engine.optimizer import (
    EMA,
    build_optimizer,
    build_schedule,
    clip_grad_norm,
    prepare_step,
    set_learning_rate,
)
from modelwright.engine.parallel import (
    distribute_like,
    full_tensor,
    gradient_sync,
    parallelize,
    persistent_buffers,
    repeated_layers,
)
from modelwright.engine.precision import MixedPrecision, convert_to_fp8, disable_tf32_in_rope, set_fp8_scaling
from modelwright.engine.spike_guard import SpikeGuard, is_bad_step
from modelwright.engine.task import AsyncCopy, Cursor, MicroBatch, RankBatch, StepReport, Task, eval_metrics, to_device
from modelwright.engine.throughput import MIN_TIMEOUT_SECONDS, TIMEOUT_AFTER_STEPS, TIMEOUT_STEPS, DeviceTimer
from modelwright.errors import Refused
from modelwright.plan.stage import StagePlan
from modelwright.recipe.schema import TrainingConfig

Result = TypeVar("Result")
TRIAL_MICRO_BATCHES, TRIAL_REPEATS = 2, 4
"""Micro-batches that are gone through where nothing is learnt yet, and how often: about 12 s with 6 B weights."""


class Engine:
    """Trains one task on this rank's share of the world."""

    def __init__(self, task: Task, settings: TrainingConfig, plan: StagePlan, world: World, seed: int) -> None:
        self.task, self.plan, self.world = task, plan, world
        self.cursor = Cursor()
        self.sampler = build_sampler(task, (plan.train_rows, plan.global_batch_size, plan.total_samples, seed))
        self.seed = seed
        self.plan_changes: list[str] = []
        self._max_grad_norm = settings.max_grad_norm
        self.eval_micro_batch_size = settings.per_device_eval_batch_size
        self._module = task.module.to(world.device)
        remainders = to_bf16_with_remainders(self._module) if plan.param_dtype == "bf16" else None
        if plan.tf32:
            disable_tf32_in_rope(self._module)
        self._fp8_linears = convert_to_fp8(self._module) if plan.precision == "fp8" else []
        self._compiles = settings.torch_compile
        self.set_precision(plan.precision, plan.fp8_scaling)
        self._parallel_module = parallelize(
            self._module, world, plan.sharding, self.precision.compute_dtype, settings.ddp_bucket_cap_mb
        )
        self.trainable_params = {name: param for name, param in self._module.named_parameters() if param.requires_grad}
        self.buffers = persistent_buffers(self._module)
        self.optimizer = build_optimizer(self._module, settings, self._distribute_remainders(remainders))
        self._skipping_optimizer = self.optimizer if world.size == 1 and isinstance(self.optimizer, BF16AdamW) else None
        self._learning_rate = build_schedule(settings, plan)
        self.ema = EMA({**self.trainable_params, **self.buffers}, settings.ema_decay)
        self.guard = SpikeGuard(settings.spike_factor)
        # fsdp lays its weights out anew each time: a recording would read where they were
        single_device = world.size == 1 and not isinstance(self._parallel_module, FSDPModule)
        self._use_graphs = world.device.type == "cuda" and single_device and plan.precision != "fp16"
        self._use_graphs = self._use_graphs and use_cuda_graphs(self._module, settings.cuda_graphs)
        self.reset_step_state()

    def set_precision(self, precision: str, fp8_scaling: str) -> None:
        """Use this arithmetic from now on; what was built in fp8 can compute in bf16 too, and nothing else changes."""
        set_fp8_scaling(self._fp8_linears, fp8_scaling if precision == "fp8" else None)
        self.precision = MixedPrecision(
            precision, self.world.device, self.plan.param_dtype, self.plan.tf32, fp8_scaling
        )
        if (precision, fp8_scaling) != (self.plan.precision, self.plan.fp8_scaling):
            self.plan = replace(self.plan, precision=precision, fp8_scaling=fp8_scaling)
        # as they are, fp8 layers cast in passes of their own: 0.85 s a step of DPO where bf16 takes 0.28
        should_compile = self._compiles or (precision == "fp8" and self.world.device.type == "cuda")
        self._compiled = CompiledLayers(
            repeated_layers(self._module) or [self._module], self.plan_changes.append, should_compile
        )

    def reset_step_state(self) -> None:
        """Forget what was prepared or recorded: weights and moments may have been replaced.

        Recorded or not, a step has four parts: the first micro-batch, whose gradients are new, those that add to them,
        their length, and the move. Each recording of the first has gradients of its own, which the others read.
        """
        self._clear_gradients()
        self._prefetched: RankBatch | None = None
        self._scale: tuple[float, Tensor] | None = None
        self._compute_timer, self._data_wait_timer, self._first_step = (
            DeviceTimer(self.world.device),
            DeviceTimer(self.world.device),
            0,
        )
        self._first_backward = GraphedCallable(self._forward_backward, list(self.trainable_params.values()))
        self._next_backward = GraphedCallable(self._forward_backward)
        self._clip, self._update = (
            GraphedCallable(part, before_capture=lambda: prepare_step(self.optimizer))
            for part in (self._clip_grads, self._optimizer_step)
        )
        if self._use_graphs:
            for group in self.optimizer.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.world.device)
                group["capturable"] = True

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, steps are computed and not replayed, so that what they do can be watched."""
        use_graphs, self._use_graphs = self._use_graphs, False
        try:
            yield
        finally:
            self._use_graphs = use_graphs

    def _distribute_remainders(self, remainders: dict[str, Tensor] | None) -> dict[Tensor, Tensor] | None:
        """What bf16 weights have lost of their masters, laid out as they are."""
        if remainders is None:
            return None
        return {
            self.trainable_params[name]: distribute_like(remainder, self.trainable_params[name])
            for name, remainder in remainders.items()
        }

    def steps(self, stop_requested: Callable[[], bool] = lambda: False) -> Iterator[StepReport]:
        """Train to the end of the plan, telling the caller about every step."""
        self._first_step = self.cursor.step
        self._module.train()
        while self.cursor.step < self.plan.steps:
            yield self._step(stop_requested())

    def _step(self, stop_requested: bool) -> StepReport:
        began = time.perf_counter()
        step, learning_rate = self.cursor.step, self._learning_rate(self.cursor.step)
        rank_batch = self._rank_batch(step)
        tokens, trained_tokens, stop_votes = self.world.all_reduce_sum(
            rank_batch.tokens, rank_batch.trained_tokens, stop_requested
        )
        if not self._module.training:  # asking each part again takes 0.8 ms, in which the device may stand still
            self._module.train()
        self.world.heartbeat.set_phase("training step")
        self._compute_timer.start()
        rank_loss = self._with_fallback(lambda: self._accumulate(self._rank_batch(step).micro_batches, trained_tokens))
        self.precision.unscale(self.optimizer)
        thresholds = torch.tensor((trained_tokens, *self.guard.thresholds()), dtype=torch.float64)
        loss_and_norm = self._clip.call_after(
            self._first_backward.last_graph, loss_sum=rank_loss, thresholds=to_device(thresholds, self.world.device)
        )
        self._data_wait_timer.start()
        self._prefetched = self._prepare(step + 1)  # while the device is still at work
        self._data_wait_timer.stop()
        set_learning_rate(self.optimizer, learning_rate)
        async_copy = AsyncCopy(loss_and_norm)
        if self._skipping_optimizer is not None:  # the device knows whether it may
            self._update.call_after(self._first_backward.last_graph)
        loss_sum, grad_norm = async_copy()  # the one moment that waits for the device
        loss, *compute_seconds = self.world.all_reduce_sum(
            loss_sum, *self._compute_timer.seconds_by_rank(self.world.rank, self.world.size)
        )
        loss /= trained_tokens
        health = self.guard.check(loss, grad_norm, self.precision.can_lower_loss_scale)
        if health == "ok" and self._skipping_optimizer is None:
            self._update.call_after(self._first_backward.last_graph)
        if health == "ok":
            self.ema.update(step)
        if self._first_backward.last_graph is None:
            self._clear_gradients()
        self.precision.update()
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
            compute_seconds_by_rank=tuple(compute_seconds),
            health=health,
            stop_requested=stop_votes > 0,
        )

    def _rank_batch(self, step: int) -> RankBatch:
        """This rank's share of a global batch, prepared ahead where it was."""
        if self._prefetched is None or self._prefetched.step != step:
            self._prefetched = self._prepare(step)
        return self._prefetched

    def _prepare(self, step: int) -> RankBatch:
        """This rank's share of a global batch; rows of like length share a micro-batch."""
        rows = sorted(self.sampler.batch_indices(step), key=self.task.row_length)
        micro_batch_rows = rank_micro_batches(rows, self.world.rank, self.world.size, self.plan.micro_batch_size)
        rows_hash = xxhash.xxh3_64_hexdigest(np.sort(rows).astype(np.int64).tobytes())
        return RankBatch(
            step,
            rows_hash,
            [self.task.batch(row_numbers, step).to_device(self.world.device) for row_numbers in micro_batch_rows],
        )

    def _with_fallback(self, step_fn: Callable[[], Result]) -> Result:
        """Do work, if need be otherwise than planned; `changes` tells how."""
        while True:
            try:
                return step_fn()
            except Exception as error:
                if (message := self._fallback_for(error)) is None:
                    raise
                self.plan_changes.append(message)
            self.reset_step_state()

    def _fallback_for(self, error: Exception) -> str | None:
        """Another way to the same step, where there is one; ranks among others keep to what was agreed."""
        if self.world.size > 1:
            return None
        if not isinstance(error, torch.OutOfMemoryError):
            return self._compiled.fallback_for(error)
        if not self._module.training and self.eval_micro_batch_size > 1:
            self.eval_micro_batch_size //= 2
            return f"evaluation micro-batch {2 * self.eval_micro_batch_size} runs out of memory; {self.eval_micro_batch_size} from now on"
        if (smaller := halve_micro_batch(self.plan)) is None or not self._module.training:
            return None
        message = (
            f"micro-batch {self.plan.micro_batch_size} runs out of memory; {smaller.batch_arithmetic} keeps the batch"
        )
        self.plan = smaller
        return message

    def _accumulate(self, micro_batches: Sequence[MicroBatch], trained_tokens: float) -> Tensor:
        """Add up the gradients of a step; returns this rank's summed loss, still on the device."""
        loss_sum: Tensor | None = None
        # ranks average their gradients: times the size, over the count, makes that the global mean
        scale = self._scale_on_device(self.world.size / trained_tokens)
        for micro_step, micro_batch in enumerate(micro_batches):
            self._seed_micro_batch(micro_step)
            with gradient_sync(self._parallel_module, enabled=micro_step == len(micro_batches) - 1):
                micro_loss = self._run_micro_batch(micro_step, scale=scale, **micro_batch.inputs_on(self.world.device))[
                    0
                ].float()
            loss_sum = micro_loss if loss_sum is None else loss_sum + micro_loss
        assert loss_sum is not None
        return loss_sum

    def _scale_on_device(self, scale: float) -> Tensor:
        """The number where the gradients are; it is mostly the one of the step before."""
        if self._scale is None or self._scale[0] != scale:
            self._scale = (scale, torch.full((), scale, device=self.world.device))
        return self._scale[1]

    def _run_micro_batch(self, micro_step: int, **inputs: Tensor) -> Tensor:
        """One micro-batch, computed or replayed: the first of a step makes the gradients, the others add to them."""
        if micro_step == 0:
            return self._first_backward.call_after(() if self._use_graphs else None, **inputs)
        return self._next_backward.call_after(self._first_backward.last_graph, **inputs)

    def _forward_backward(self, scale: Tensor, **inputs: Tensor) -> Tensor:
        """Add one micro-batch to the gradients; returns its summed measures, the loss first."""
        with self.precision.autocast():
            sums: Tensor = self._parallel_module(**inputs).flatten()
        if self.world.size > 1:
            self._compute_timer.stop()  # from the last of these on gradients are exchanged, and the fast wait for the slow
        self.precision.backward(sums[0] * scale)
        return sums.detach()

    def time_trial(self) -> tuple[list[float], float]:
        """Go forward and back over the first batches and move nothing: their summed measures, the fastest's seconds."""
        return self._with_fallback(self._run_time_trial)

    def _run_time_trial(self) -> tuple[list[float], float]:
        rows = sorted(self.sampler.batch_indices(0), key=self.task.row_length)
        micro_batch_rows = rank_micro_batches(rows, self.world.rank, self.world.size, self.plan.micro_batch_size)
        make_batch = getattr(self.task, "time_trial_batch", self.task.batch)
        micro_batches = [make_batch(row_numbers, 0) for row_numbers in micro_batch_rows[:TRIAL_MICRO_BATCHES]]
        scale = torch.full(
            (), 1 / max(1, sum(micro_batch.trained_tokens for micro_batch in micro_batches)), device=self.world.device
        )
        self._module.train()
        seconds, gpus = [], [self.world.device.index or 0] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            for _ in range(TRIAL_REPEATS + WARMUP_CALLS * self._use_graphs):
                began = time.perf_counter()
                sums = torch.zeros(len(self.task.metric_names), device=self.world.device)
                for micro_step, micro_batch in enumerate(micro_batches):
                    self._seed_micro_batch(micro_step)
                    with gradient_sync(self._parallel_module, enabled=True):
                        sums += self._run_micro_batch(
                            micro_step, scale=scale, **micro_batch.inputs_on(self.world.device)
                        )
                for gpu in gpus:
                    torch.cuda.synchronize(gpu)
                seconds.append(time.perf_counter() - began)
        self.reset_step_state()
        return sums.tolist(), min(seconds)

    def _clip_grads(self, loss_sum: Tensor, thresholds: Tensor) -> Tensor:
        """Shorten the gradient where it is too long, or as it is read; returns the summed loss and how long it was."""
        grad_norm = clip_grad_norm(
            self.optimizer, list(self.trainable_params.values()), self._max_grad_norm or float("inf")
        )
        loss_and_norm = torch.stack((loss_sum, grad_norm)).double()
        if self._skipping_optimizer is not None:
            self._skipping_optimizer.skip_step_if(is_bad_step(loss_and_norm[0], loss_and_norm[1], thresholds))
        return loss_and_norm

    def _optimizer_step(self) -> Tensor:
        """Move the weights."""
        self.precision.step(self.optimizer)
        return next(iter(self.trainable_params.values()))

    def _clear_gradients(self) -> None:
        """Let go of them; a recording's own are written anew in their places, and are left there between its steps."""
        self.optimizer.zero_grad(set_to_none=True)

    def _seed_micro_batch(self, micro_step: int) -> None:
        """Seed the random numbers of one micro-batch by its place in the run, whatever the world's size."""
        micro_batch_index = micro_step * self.world.size + self.world.rank
        self.world.manual_seed(
            xxhash.xxh3_64_intdigest(f"{self.seed}:{self.cursor.step}:{micro_batch_index}".encode()) >> 1
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """What the task measures, as means over everything held out: eval_loss, and others by their name."""
        self._module.eval()
        with self.ema.swap():
            rank_sums, rank_trained_tokens = self._with_fallback(self._held_out_sums)
        *sums, count = self.world.all_reduce_sum(*rank_sums.tolist(), rank_trained_tokens)
        return eval_metrics(dict(zip(self.task.metric_names, sums, strict=True)), count)

    def _held_out_sums(self) -> tuple[Tensor, int]:
        """This rank's share of what is held out: [measures], and how much was measured."""
        sums, trained_tokens = torch.zeros(len(self.task.metric_names), device=self.world.device), 0
        for rows in rank_micro_batches(
            range(self.task.held_out_rows), self.world.rank, self.world.size, self.eval_micro_batch_size
        ):
            self.world.heartbeat.set_phase("evaluating")
            micro_batch = self.task.held_out_batch(rows)
            with self.precision.autocast():
                sums += self._parallel_module(**micro_batch.inputs_on(self.world.device)).flatten()
            trained_tokens += micro_batch.trained_tokens
        return sums, trained_tokens

    @torch.no_grad()
    def predict(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Tensor]:
        """What the module gives for batches, on the CPU, without learning from them; every rank looks as often."""
        self._module.eval()
        for micro_batch in micro_batches:
            with self.precision.autocast():
                yield self._parallel_module(**micro_batch.inputs_on(self.world.device)).float().cpu()


MODEL_FILE, OPTIMIZER_FILE, EMA_FILE = "model.safetensors", "optimizer.safetensors", "ema.safetensors"


def state_dict(engine: Engine, **extra_state: Any) -> Snapshot:
    """Everything that is needed to go on from here: moving weights, optimizer, cursor, guard, scaler."""
    optimizer_tensors = [
        _lazy_tensor(f"{name}.{key}", value)
        for name, param in engine.trainable_params.items()
        for key, value in engine.optimizer.state.get(param, {}).items()
    ]
    state = {
        "cursor": asdict(engine.cursor),
        "seed": engine.seed,
        "guard": engine.guard.state_dict(),
        "precision": engine.precision.state_dict(),
        **extra_state,
    }
    files = {
        MODEL_FILE: [_lazy_tensor(*item) for item in {**engine.trainable_params, **engine.buffers}.items()],
        OPTIMIZER_FILE: optimizer_tensors,
    }
    if engine.ema.shadow:
        files[EMA_FILE] = [_lazy_tensor(*item) for item in engine.ema.shadow.items()]
    return Snapshot(engine.cursor.step, state, files)


@contextmanager
def explain_mismatch(folder: Path) -> Iterator[None]:
    """Tell a checkpoint that verifies and yet holds something else: made by others, or by another version."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise Refused(
            f"checkpoint {folder} is valid, but not of this stage ({reason}); take it away, or choose another "
            "output_dir"
        ) from None


def load_state_dict(engine: Engine, folder: Path) -> dict[str, Any]:
    """Go on from a verified checkpoint; returns its plain values, those kept beside among them."""
    state = read_state(folder)
    remainders = load_weights(engine, folder)
    engine.optimizer.state.clear()
    has_remainders = engine.precision.param_dtype == "bf16"
    with safe_open(folder / OPTIMIZER_FILE, "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 (this is no dict)
            name, state_key = key.rsplit(".", 1)
            param, value = engine.trainable_params[name], stored.get_tensor(key)
            if state_key == PARAM_REMAINDER:
                continue  # it went into the weights
            is_count = state_key == "step"  # AdamW counts on the weight's own device where it is fused
            engine.optimizer.state[param][state_key] = (
                value.to(param.device) if is_count else distribute_like(value, param)
            )
    if has_remainders:
        for name, remainder in remainders.items():
            engine.optimizer.state[engine.trainable_params[name]][PARAM_REMAINDER] = distribute_like(
                remainder, engine.trainable_params[name]
            )
    engine.guard.load_state_dict(state["guard"])
    engine.precision.load_state_dict(state["precision"])
    engine.cursor = Cursor(**state["cursor"])
    engine.reset_step_state()
    return state


@torch.no_grad()
def load_weights(engine: Engine, folder: Path) -> dict[str, Tensor]:
    """Take the weights of a verified checkpoint, and their mean; returns what bf16 weights lost of their masters.

    A checkpoint of bf16 weights with rests gives fp32 weights where those are kept now, and the other way round.
    """
    remainders: dict[str, Tensor] = {}
    with safe_open(folder / MODEL_FILE, "pt") as stored, safe_open(folder / OPTIMIZER_FILE, "pt") as optimizer_state:
        split_names = {
            name.removesuffix(f".{PARAM_REMAINDER}")
            for name in optimizer_state.keys()
            if name.endswith(f".{PARAM_REMAINDER}")
        }
        for name, tensor in {**engine.trainable_params, **engine.buffers}.items():
            value = stored.get_tensor(name)
            if name in split_names:
                value = join_fp32_master(value, optimizer_state.get_tensor(f"{name}.{PARAM_REMAINDER}"))
            if tensor.dtype is torch.bfloat16 and value.dtype is torch.float32:
                value, remainders[name] = split_fp32_master(value)
            tensor.copy_(distribute_like(value, tensor))
    if engine.ema.shadow:
        with safe_open(folder / EMA_FILE, "pt") as stored:
            for name, shadow in engine.ema.shadow.items():
                shadow.copy_(distribute_like(stored.get_tensor(name), shadow))
    return remainders


def _lazy_tensor(name: str, tensor: Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(tensor.shape), tensor.dtype, lambda: full_tensor(tensor))
