"""Train one stage: the engine runs the steps, StageRunner evaluates, checkpoints, rolls back, stops and saves."""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelwright.engine.checkpoint import AsyncCheckpointer, CheckpointManager, read_state, to_host
from modelwright.engine.distributed import visible_gpus
from modelwright.engine.parallel import full_tensor
from modelwright.engine.task import StepReport
from modelwright.engine.throughput import GpuMonitor, StragglerDetector, ThroughputMeter
from modelwright.engine.trainer import MODEL_FILE, explain_mismatch
from modelwright.errors import Interrupted, ModelError, UsageError
from modelwright.models.attention import unwrap_peft
from modelwright.models.save import check_weight_files, load_and_check
from modelwright.plan.stage import StagePlan, eval_samples, plan_stage
from modelwright.recipe.stage_specs import name_images
from modelwright.report.formatting import pluralize
from modelwright.runs.folder import RunFolder, write_json, write_json_with_checksum
from modelwright.stages import evaluate
from modelwright.stages.context import (
    GracefulShutdown,
    RunContext,
    StageBuilder,
    StageInputs,
    build_resume_config,
    check_resume_config,
    environment_changes,
    environment_of,
)
from modelwright.stages.evaluate import EvalHistory, diverged
from modelwright.stages.gate import hash_model_files
from modelwright.stages.planning import (
    build_engine,
    explain_out_of_memory,
    fit_plan,
    log_prediction_error,
    profile_one_step,
    update_plan_file,
)

SAMPLING_BYTES = 8 << 30
"""GPU memory besides the weights that sampled answers may take."""
EVALUATION_LOG_SECONDS = 10.0
"""Time between two journal entries about the progress of an evaluation."""
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}
"""Largest relative difference of a loaded model's loss: sums in another order (TF32 too), and fp8, which it lacks."""


class StageRunner:
    """One training stage of a run."""

    def __init__(
        self, context: RunContext, builder: StageBuilder, inputs: StageInputs, stage: str, shutdown: GracefulShutdown
    ) -> None:
        self.context, self.stage, self.shutdown = context, stage, shutdown
        self.settings = context.recipe.stages[stage]
        self.resume_config = build_resume_config(
            context.recipe, stage, inputs.data_fingerprint, inputs.model_fingerprint
        )
        self.checkpoints = CheckpointManager(
            context.folder.checkpoints(stage), self.settings.save_total_limit, lambda line: self._note(line)
        )
        async_save, on_gpu = self.settings.async_save, context.world.device.type == "cuda"
        self.checkpointer = AsyncCheckpointer(
            self.checkpoints, context.world, async_save == "always" or (async_save == "auto" and on_gpu)
        )
        resumed_step = self._newest_checkpoint_step()
        if isinstance(path := self.settings.resume_from_checkpoint, str):
            if resumed_step is None:
                resumed_step = self._import_checkpoint(Path(path))
            else:
                other = f"not {path} (resume_from_checkpoint); for that, choose another output_dir"
                self._note(f"this run has a checkpoint of its own and continues from its step {resumed_step}, {other}")
        resumed_batch, resumed_rows = self._resumed_batch(resumed_step)
        self.while_saving: Callable[[], object] = lambda: None
        context.world.heartbeat.set_phase("loading model")
        self.parts = builder.build(context, inputs, stage)
        self.task = self.parts.task
        self._log_model_and_data(inputs)
        with context.span("plan", stage):
            plan = plan_stage(self.settings, self.task.epoch_rows, context.world.size, context.hardware, resumed_batch)
            plan = fit_plan(plan, stage, self.parts, context, resumed_rows)
        self._log_plan("plan", plan)
        self.loss_template = copy.copy(self.task.module)  # before it is sharded
        # the fp8 trial runs steps
        with explain_out_of_memory(lambda: plan, stage, self.parts, context), context.span("engine", stage):
            self.engine = build_engine(plan, stage, self.parts, context)
        self._log_plan_revisions()
        self._choose_eval_rows()
        with context.span("precompute", stage):
            note = self.parts.precompute(self.engine, context.folder.frozen_cache(stage))
        if note:
            self._note(note)
        self.eval_history = EvalHistory(stage, self.settings.metric_for_best_model)
        self.judges_answers = self.settings.metric_for_best_model.startswith("answers.")
        if self.settings.early_stopping_patience and not self.task.held_out_rows:
            raise UsageError(
                f"{stage}.early_stopping_patience needs held-out rows, and there are none (data.test_size)"
            )
        self.last_saved_step, self.earlier_seconds, self.began = 0, 0.0, time.monotonic()
        self.evaluation_logged = 0.0
        self.consecutive_bad_steps, self.rolled_back_from, self.evaluation_pending = 0, 0, False
        self.speed: dict[str, Any] = {}
        self.gpu_monitor = GpuMonitor(visible_gpus())
        if resumed_step is not None:
            self._resume_from(resumed_step)

    def run(self) -> dict[str, float | None]:
        """Train to the end, or until a signal asks to stop; returns the metrics."""
        with explain_out_of_memory(lambda: self.engine.plan, self.stage, self.parts, self.context):
            if self.engine.must_compile:
                # a signal inside the compiler would be taken for its error
                with self.shutdown.defer_to_step_end(), self.context.span("compile", self.stage):
                    self.engine.compile_layers()
            if self.task.held_out_rows and (self.evaluation_pending or not self.eval_history.records):
                self._evaluate()
            plan, peak_flops = self.engine.plan, self._peak_flops()
            meter = ThroughputMeter(plan.steps, plan.global_batch_size, self.parts.flops_per_token(plan), peak_flops)
            self.began = time.monotonic()
            with self.checkpointer:
                with self.shutdown.defer_to_step_end():
                    self._train(meter)
                    if self._rolled_back_at_end():
                        self._train(meter)
                self._evaluate_and_save_end()
                log_prediction_error(self.context, self.stage, self.engine.plan, self.speed)
                return self._finish()

    def _train(self, meter: ThroughputMeter) -> None:
        """Run the remaining steps of the plan, or those until the metric has stopped improving."""
        stragglers, stop_requests = StragglerDetector(), 0
        if self._stops_early():  # also where a run resumes from the checkpoint of its last step
            return
        for report in self._steps():
            self._log_plan_revisions()
            self._log_step(report, meter)
            self.checkpointer.preallocate_buffers(self.engine.state_dict, report.step_seconds, self._steps_left(report))
            for line in stragglers.check(report.compute_seconds_by_rank):
                self._note(line)
            if report.health not in ("ok", "overflow"):
                self._skip_or_roll_back(report)
            else:
                self._after_good_step(report)
            if self.checkpointer.is_done() or report.stop_requested:
                self._wait_for_save()
            stop_requests += report.stop_requested
            # after a bad step nothing is saved; one more step may be good
            wait_one_step = self.consecutive_bad_steps and stop_requests == 1 and report.step < self.engine.plan.steps
            if stop_requests and not wait_one_step:
                raise self._interrupted()
            if self._stops_early():
                return

    def _stops_early(self) -> bool:
        """Whether the last evaluations, which checkpoints keep, did not improve the metric."""
        patience, metric = self.settings.early_stopping_patience, self.settings.metric_for_best_model
        threshold = self.settings.early_stopping_threshold or 0.0
        if patience is None or self.eval_history.evaluations_without_improvement(threshold) < patience:
            return False
        step = f"stopped early at step {self.engine.cursor.step} of {self.engine.plan.steps}"
        evaluations = pluralize(patience, "evaluation")
        self._note(f"{step}: {metric} did not improve in {evaluations} (early_stopping_patience)")
        return True

    def _interrupted(self) -> Interrupted:
        step, steps = self.engine.cursor.step, self.engine.plan.steps
        return Interrupted(f"stopped after step {step} of {steps}; rerun the same command to resume")

    def _steps(self) -> Iterator[StepReport]:
        """The engine's steps, one of them under the memory profiler where the recipe asks for it."""
        steps = self.engine.steps(self.shutdown.requested)
        return profile_one_step(self.engine, steps, self.context, self.stage) if self.settings.profile_memory else steps

    def _rolled_back_at_end(self) -> bool:
        """Roll back once where training ended with bad steps, since the weights themselves may be bad."""
        step = self.engine.cursor.step
        if not self.consecutive_bad_steps or step <= self.rolled_back_from:
            return False
        checkpoint_step = self._newest_checkpoint_step()
        if checkpoint_step is not None:
            self._roll_back(step, checkpoint_step)
        return checkpoint_step is not None

    def _roll_back(self, step: int, checkpoint_step: int) -> None:
        self.rolled_back_from, self.consecutive_bad_steps = step, 0
        self._resume_from(checkpoint_step)
        self._note(f"rolled back from step {step} to checkpoint {checkpoint_step}")

    def _evaluate_and_save_end(self) -> None:
        """Evaluate and save the final weights where the last step did not, because it was bad."""
        if self.task.held_out_rows and not self.eval_history.evaluated_at(self.engine.cursor.step):
            self._evaluate()
        self._save(is_last=True)  # its files may be written while the model is

    def _after_good_step(self, report: StepReport) -> None:
        """Evaluate and save when due, also where it was due at a skipped step before."""
        self.consecutive_bad_steps = 0
        step, plan = report.step, self.engine.plan
        is_last, last_checked = step == plan.steps, max(self.eval_history.last_step(), self.last_saved_step)
        if self.task.held_out_rows and (is_last or _is_due(step, plan.eval_steps, last_checked, plan.steps)):
            self._evaluate()
        save_due = _is_due(step, plan.save_steps, self.last_saved_step, plan.steps)
        if save_due and self.settings.save_steps.fraction:  # a share is not exact: save later, without waiting
            save_due = not self.checkpointer.would_wait((plan.steps - step) * report.step_seconds)
        if is_last or report.stop_requested or save_due or self._best_step() == step:
            self._save(is_last=is_last or report.stop_requested)

    def _steps_left(self, report: StepReport) -> float:
        """Steps after the next save; infinite if that save is made also where the last one waits for it."""
        plan, step = self.engine.plan, report.step
        if _is_due(step, plan.save_steps, self.last_saved_step, plan.steps):
            next_due = step + 1
        else:
            next_due = (step // plan.save_steps + 1) * plan.save_steps
        is_exact = next_due < plan.steps and not self.settings.save_steps.fraction
        saves_best = plan.eval_steps < plan.steps and self.task.held_out_rows and self.settings.load_best_model_at_end
        if is_exact or saves_best or self.context.world.size > 1:  # ranks gather the last one into the buffers too
            return math.inf
        return max(0, plan.steps - next_due)

    def _skip_or_roll_back(self, report: StepReport) -> None:
        """After a bad step, which left the weights unchanged: roll back once after too many in a row, then stop."""
        self.consecutive_bad_steps += 1
        health, loss, grad_norm = report.health, report.loss, report.grad_norm
        message = f"step {report.step} is skipped: {health} (loss {loss:.4g}, gradient {grad_norm:.4g})"
        self._log("step_skipped", step=report.step, health=health, message=message)
        if self.consecutive_bad_steps <= self.settings.max_skipped_steps:
            return
        checkpoint_step = self._newest_checkpoint_step()
        if checkpoint_step is None or report.step <= self.rolled_back_from:
            no_checkpoint = "and there is no checkpoint to roll back to"
            why = no_checkpoint if checkpoint_step is None else "again after rolling back"
            raise diverged(
                f"{self.stage} diverged at step {report.step}: {report.health} {self.consecutive_bad_steps} steps in a "
                f"row, {why}"
            )
        self._roll_back(report.step, checkpoint_step)

    def _choose_eval_rows(self, count: int | None = None) -> None:
        """Evaluate on so many held-out rows, or as many as the recipe and its training want; the seed chooses them."""
        rows, manifest, plan = self.task.held_out_rows, self.parts.data_manifest, self.engine.plan
        train = manifest.get("packed") or manifest.get("train") or {}
        held_out = rows, int(manifest.get("held_out", {}).get("tokens", 0))
        count = count or eval_samples(self.settings.max_eval_samples, plan, int(train.get("tokens", 0)), held_out)
        if rows and count != len(self.engine.eval_rows):
            rng = np.random.Generator(np.random.Philox(key=[self.context.recipe.seed, 0]))
            order = rng.permutation(rows)
            sources = np.repeat(np.arange(len(held := self.task.held_out_sources)), [*held.values()])
            if len(sources):  # at least one row of each source, so that its metrics exist
                firsts = np.unique(sources[order], return_index=True)[1]
                order = np.array([*order[firsts], *np.delete(order, firsts)])
            self.engine.eval_rows = np.sort(order[:count]).tolist()
            self._note(f"evaluations take {count:,} of {rows:,} held-out rows, chosen by the seed (max_eval_samples)")

    def _log_progress(self, fraction: float) -> None:
        """Log how far an evaluation is, every ten seconds."""
        if time.monotonic() - self.evaluation_logged >= EVALUATION_LOG_SECONDS:
            self.evaluation_logged = time.monotonic()
            self._log("evaluating", step=self.engine.cursor.step, fraction=round(fraction, 3))

    def _evaluate(self) -> None:
        self.evaluation_logged = started = time.monotonic()
        self.engine.on_evaluating = self._log_progress
        values = self.engine.evaluate(self.shutdown.requested)
        self._log_plan_revisions()
        if values is not None and self.judges_answers and self.engine.cursor.step:
            judged = self._judge_answers()
            values = None if judged is None else {**values, **judged}
        if values is None:
            self._save(evaluation_pending=True, is_last=True)
            self._wait_for_save()
            raise self._interrupted()
        record = self.eval_history.add(self.engine.cursor.step, values)
        self._log("evaluation", **record, seconds=round(time.monotonic() - started, 3))

    def _judge_answers(self) -> dict[str, float] | None:
        """The metrics of evaluate.answers for the current weights, as for a finished stage; None if stopped."""
        with self.engine.ema.swap():
            weights = self._full_weights()
            return self.context.world.on_rank0_broadcast(lambda: self._judge_weights(weights))

    def _judge_weights(self, weights: dict[str, Any]) -> dict[str, float] | None:
        self.context.world.heartbeat.set_phase("comparing")
        folder = self.context.folder.judged_model(self.stage)
        self.parts.save(weights, folder)
        try:
            return evaluate.judge_model(folder, evaluate.evaluation_job(self.context), self.shutdown.requested).metrics
        except Interrupted:
            return None
        finally:
            shutil.rmtree(folder)

    def _full_weights(self, stays: bool = False, is_saved: bool = False) -> dict[str, Any]:
        """The unsharded weights, on rank 0; in CPU memory unless each stays on its device. Where they are those of the
        last save, its copies are taken. Tied weights are copied once, so that they are written once."""
        weights, engine = {}, self.engine
        copies = self.checkpointer.host_copies(engine.cursor.step, MODEL_FILE, engine.saved_weights) if is_saved else {}
        for name, tensor in self.parts.model.state_dict().items():
            full = full_tensor(tensor)  # a collective: every rank calls it, rank 0 keeps the result
            if self.context.world.is_main:
                copy = full if stays else copies.get(full.data_ptr())
                if copy is None or (copy.shape, copy.dtype) != (full.shape, full.dtype):
                    copy = to_host(full)
                    if self.context.world.size == 1:  # a gathered tensor is freed, and the next has its address
                        copies[full.data_ptr()] = copy
                weights[name] = copy
        return weights

    def _save(self, evaluation_pending: bool = False, is_last: bool = False) -> None:
        if self.last_saved_step == self.engine.cursor.step:
            return
        started = time.monotonic()
        self.context.world.heartbeat.set_phase("saving")
        extra_state = {
            "resume_config": self.resume_config,
            "global_batch_size": self.engine.plan.global_batch_size,
            "micro_batch_size": self.engine.plan.micro_batch_size,
            "environment": environment_of(self.context),
            "evaluations": list(self.eval_history.records),
            "seconds": self._training_seconds(),
            "evaluation_pending": evaluation_pending,
            "eval_samples": len(self.engine.eval_rows),
        }
        self._wait_for_save()
        if self.checkpointer.save(self.engine.state_dict(**extra_state), self._best_step(), is_last):
            seconds = round(time.monotonic() - started, 3)
            self._log("checkpoint_started", step=self.engine.cursor.step, seconds=seconds)
        else:
            self._wait_for_save()
        self.last_saved_step = self.engine.cursor.step

    def _wait_for_save(self) -> None:
        """Wait for an asynchronous save and log it."""
        if saved := self.checkpointer.wait():
            self._log("checkpoint_saved", step=saved.step, seconds=round(saved.seconds, 3),
                      blocked_seconds=round(saved.blocked_seconds, 3), async_save=saved.background)  # fmt: skip

    def _newest_checkpoint_step(self) -> int | None:
        """The step of the newest valid checkpoint, the same on all ranks."""
        self._wait_for_save()

        def find_newest() -> int | None:
            folder = self.checkpoints.newest_valid()
            return None if folder is None else int(folder.name.split("-")[1])

        return self.context.world.on_rank0_broadcast(find_newest)

    def _import_checkpoint(self, folder: Path) -> int:
        """Copy a checkpoint of another run as this run's first."""

        def import_checkpoint() -> int:
            if len(folder.absolute().parents) > 4:
                RunFolder(folder.absolute().parents[3]).check_format()
            step = self.checkpoints.import_from(folder)
            self._note(f"begins from step {step} of {folder} (resume_from_checkpoint)")
            return step

        return self.context.world.on_rank0_broadcast(import_checkpoint)

    def _resumed_batch(self, step: int | None) -> tuple[int | None, int | None]:
        """Global batch and, on the same hardware, micro-batch (0: not saved); refuses a changed resume config."""
        if step is None:
            return None, None
        with explain_mismatch(self._checkpoint_dir(step)):
            saved = read_state(self._checkpoint_dir(step))
            saved_config, global_batch_size = dict(saved["resume_config"]), int(saved["global_batch_size"])
            rows, environment = int(saved.get("micro_batch_size", 0)), dict(saved.get("environment", {}))
        for change in check_resume_config(saved_config, self.resume_config, self.context.options.overrides):
            self._note(f"resuming although {change} (--allow-changed)")
        if any("batch" in key or "accumulation" in key for key in self.context.options.overrides):
            return None, None
        current = environment_of(self.context)
        is_same = all(environment.get(name) == current[name] for name in ("device", "number of ranks"))
        return global_batch_size, rows if is_same else None

    def _resume_from(self, step: int) -> None:
        with explain_mismatch(self._checkpoint_dir(step)):
            saved = self.engine.load_state_dict(self._checkpoint_dir(step))
            self.eval_history.records = list(saved["evaluations"])
            self.earlier_seconds, self.began = float(saved["seconds"]), time.monotonic()
            self.evaluation_pending = bool(saved.get("evaluation_pending"))
        if self.settings.max_eval_samples is None:  # the same rows as before, also where eval_steps has changed
            self._choose_eval_rows(saved.get("eval_samples"))
        self.last_saved_step = step
        self._log("resumed", step=step, steps=self.engine.plan.steps)
        if change := environment_changes(saved.get("environment", {}), environment_of(self.context)):
            self._note(change)

    def _checkpoint_dir(self, step: int) -> Path:
        return self.context.folder.checkpoints(self.stage) / f"step-{step:08d}"

    def _best_valid_step(self) -> int | None:
        """The best step whose checkpoint is valid; a damaged one is skipped with a note."""
        while (best := self._best_step()) not in (None, self.engine.cursor.step):
            assert best is not None
            if self.context.world.on_rank0_broadcast(lambda best=best: self.checkpoints.valid_at(best) is not None):  # type: ignore[misc]
                return best
            self._note(f"the checkpoint of step {best}, the best, is damaged; the next best is taken")
            self.eval_history.drop_step(best)
        return best

    def _best_step(self) -> int | None:
        """The step whose weights are kept; None: those of the last."""
        return self.eval_history.best_step() if self.settings.load_best_model_at_end else None

    def _peak_flops(self) -> float | None:
        """Peak FLOPs per second of all devices together."""
        peak = self.context.hardware.peak_flops
        return peak * self.context.world.size if peak else None

    def _training_seconds(self) -> float:
        """Training time, including earlier starts of this run up to their last checkpoint."""
        return round(self.earlier_seconds + time.monotonic() - self.began, 2)

    def _finish(self) -> dict[str, float | None]:
        """Restore the best weights, write the model folder, then the result that marks the stage as finished."""
        best = self._best_valid_step()
        is_saved = best in (None, self.engine.cursor.step) and not self.engine.ema.shadow
        if not is_saved:  # the weights are replaced, and the last checkpoint may not have been written
            self._wait_for_save()
        if best is not None and best != self.engine.cursor.step:
            self.engine.load_weights(self._checkpoint_dir(best))
            self._note(f"best checkpoint restored: step {best} ({self.settings.metric_for_best_model})")
        self.engine.ema.copy_to()
        metrics = {
            **self.eval_history.metrics(self.engine.cursor.step if best is None else best),
            "steps": self.engine.cursor.step,
            **name_images(
                {name: getattr(self.engine.cursor, name) for name in ("tokens", "trained_tokens")}, self.stage
            ),
            "seconds": self._training_seconds(),
        }
        self.context.world.heartbeat.set_phase("saving")
        with self.context.span("final model", self.stage):
            batch = self.parts.check_batch
            # a model that is loaded again is compared on the device: LoRA writes little of it, and copies nothing
            weights = self._full_weights(batch is not None and self.context.world.size == 1, is_saved)
            trained_loss = None if batch is None else self.engine.summed_output(batch)  # on every rank
            saved = self.context.world.on_rank0_broadcast(lambda: self._save_model(weights, trained_loss))
        self._wait_for_save()  # of the last checkpoint: the stage is finished when both are on disk
        plan = name_images(self.engine.plan.as_json(), self.stage)
        result = {"metrics": metrics, "resume_config": self.resume_config, "plan": plan, **saved}
        self.context.world.on_rank0_broadcast(lambda: self._write_result(result))
        return metrics

    def _save_model(self, weights: dict[str, Any], trained_loss: float | None) -> dict[str, Any]:
        """Write the model folder and check it, while `while_saving` runs; returns what the result says about it."""
        folder = self.context.folder.model(self.stage)

        def save() -> dict[str, Any]:
            self.parts.save(weights, folder)
            hashes = executor.submit(hash_model_files, folder)  # both read the files
            round_trip = self._check_round_trip(folder, weights, trained_loss)
            return {"files": hashes.result(), "round_trip": round_trip}

        with ThreadPoolExecutor(2) as executor:
            if not self._has_room_for_two():
                return save()
            saved = executor.submit(save)
            with suppress(torch.OutOfMemoryError):  # it is done later, when the memory is free
                self.while_saving()
            return saved.result()

    def _has_room_for_two(self) -> bool:
        """Whether the GPU has room for a second model in fp32 and its KV cache; a CPU has other work to do."""
        device = self.context.world.device
        if device.type != "cuda" or self.parts.check_batch is not None:
            return False
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        needed = 4 * self.parts.parameter_counts.total + SAMPLING_BYTES
        return free - torch.cuda.memory_allocated(device) > needed

    def _write_result(self, result: dict[str, Any]) -> None:
        write_json_with_checksum(self.context.folder.result(self.stage), result)
        for folder in (self.context.folder.frozen_cache(self.stage), self.context.folder.judged_model(self.stage)):
            shutil.rmtree(folder, ignore_errors=True)

    def _check_round_trip(self, folder: Path, weights: dict[str, Any], trained_loss: float | None) -> dict[str, Any]:
        """Fail unless what is on disk is what was trained: weights bit for bit, and the losses of the loaded model."""
        started, loaded_loss = time.monotonic(), None
        if trained_loss is not None or not check_weight_files(folder, weights):
            quantization = getattr(self.settings, "quantization", "none")
            model = load_and_check(folder, weights, quantization, self.context.world.device)
        if trained_loss is not None:
            loaded_loss = self._loss_of(model)
            tolerance = LOSS_TOLERANCE[self.engine.plan.precision] * abs(trained_loss)
            if loaded_loss is not None and not abs(loaded_loss - trained_loss) <= tolerance:
                losses = f"a loss of {loaded_loss:.6g} on rows where the trained one has {trained_loss:.6g}"
                raise ModelError(f"{folder}: the saved model has {losses}; please report it")
        seconds = round(time.monotonic() - started, 2)
        return {"trained_loss": trained_loss, "loaded_loss": loaded_loss, "seconds": seconds}

    @torch.no_grad()
    def _loss_of(self, model: Any) -> float | None:
        """The summed loss of a loaded model on the rows of `check_batch`; None where the device has no room for it."""
        device, batch, module = self.context.world.device, self.parts.check_batch, self.loss_template
        assert batch is not None
        unwrap_peft(model).set_attn_implementation(unwrap_peft(self.parts.model).config._attn_implementation)
        try:
            module._modules = {**module._modules, "model": model.to(device).eval()}
            with self.engine.precision.autocast():
                return float(module(**batch.inputs_on(device)).float().sum())
        except torch.OutOfMemoryError:
            self._note("losses of the saved model not compared: no room for a second copy; its weights are equal")
            return None

    def _log_model_and_data(self, inputs: StageInputs) -> None:
        counts, manifest = self.parts.parameter_counts, self.parts.data_manifest
        self._log("model", name=inputs.model_name, revision=inputs.revision, trainable_summary=str(counts),
                  trainable_parameters=counts.trained, parameters=counts.total)  # fmt: skip
        self._log("data", **manifest)
        path = self.context.folder.data_manifest(self.stage)
        self.context.world.on_rank0_broadcast(lambda: write_json(path, manifest))

    def _log_plan(self, event: str, plan: StagePlan, **revision: Any) -> None:
        """Write a plan to the journal and to plan.json."""
        self._log(event, device=self.context.hardware.name, **revision, **plan.as_json())
        update_plan_file(self.context, self.stage, plan.as_json())

    def _log_step(self, report: StepReport, meter: ThroughputMeter) -> None:
        meter.record(report)
        if report.step % self.settings.logging_steps == 0 or report.step in (1, self.engine.plan.steps):
            self.speed = meter.summary()
            accuracy = report.metrics.get("accuracy")
            self._log(
                "step", step=report.step, steps=self.engine.plan.steps, epoch=round(report.epoch, 4), loss=report.loss,
                grad_norm=report.grad_norm, learning_rate=report.learning_rate, tokens=report.tokens,
                batch_hash=report.batch_hash, step_seconds=round(report.step_seconds, 4), health=report.health,
                **self.speed, **({} if accuracy is None else {"train_accuracy": round(accuracy, 6)}),
                **self.gpu_monitor.read(),
            )  # fmt: skip

    def _log_plan_revisions(self) -> None:
        """Log the plans that the engine has adopted, each with its reason and what changed, and the engine's notes."""
        while self.engine.notes:
            self._note(self.engine.notes.pop(0))
        for previous, plan in pairwise(self.engine.plans):
            self._log_plan("plan_revised", plan, reason=plan.reasons[-1], changes=plan.changes_from(previous))
        del self.engine.plans[:-1]

    def _note(self, line: str) -> None:
        self.context.note(self.stage, line)

    def _log(self, event: str, **fields: Any) -> None:
        self.context.journal.add(event, stage=self.stage, **name_images(fields, self.stage))


def _is_due(step: int, every: int, last: int, steps: int) -> bool:
    """Whether a multiple of `every` was passed since step `last`, unless the last step follows so soon that it would be
    done twice: within a tenth of `every`."""
    return step // every > last // every and (steps - step) * 10 >= every
