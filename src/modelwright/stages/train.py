"""Train one stage: the engine steps, this decides about measuring, saving, going back and stopping."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelwright.engine import state
from modelwright.engine.checkpoint import Checkpoints, read_state
from modelwright.engine.meter import Meter
from modelwright.engine.pace import Stragglers
from modelwright.engine.saving import Saver
from modelwright.engine.shard import whole
from modelwright.engine.step import StepReport
from modelwright.errors import Diverged, Interrupted
from modelwright.plan.stage import plan_stage
from modelwright.runs.folder import hash_file, read_json, write_json, write_sealed
from modelwright.stages.arithmetic import engine_of
from modelwright.stages.context import Context
from modelwright.stages.foresee import foreseen, held_against, memory_told, watched
from modelwright.stages.kinds import Ingredients, Kind
from modelwright.stages.measured import Measurements
from modelwright.stages.signals import Stopper
from modelwright.stages.wishes import refuse_changes, wishes_of


class Training:
    """One training stage of a run."""

    def __init__(self, context: Context, kind: Kind, found: Ingredients, stage: str, stopper: Stopper) -> None:
        self.context, self.stage, self.stopper = context, stage, stopper
        self.settings = context.recipe.stages[stage]
        self.wishes = wishes_of(context.recipe, stage, found.data_fingerprint, found.model_fingerprint)
        self.checkpoints = Checkpoints(
            context.folder.checkpoints(stage), self.settings.save_total_limit, lambda line: self._note(line)
        )
        wish, on_gpu = self.settings.save_in_background, context.world.device.type == "cuda"
        self.saver = Saver(self.checkpoints, context.world, wish == "always" or (wish == "auto" and on_gpu))
        resumed = self._newest_step()
        if resumed is None and isinstance(self.settings.resume_from_checkpoint, str):
            resumed = self._begin_from(Path(self.settings.resume_from_checkpoint))
        kept = self._kept_batch(resumed)
        context.world.beat.at("loading")
        self.built = kind.build(context, found, stage)
        self.task = self.built.task
        self._tell_model_and_data(found)
        self.plan = plan_stage(self.settings, self.task.rows, context.world.size, context.facts, kept)
        self.plan = foreseen(self.plan, stage, self.built, context)
        self._tell_plan()
        self.built.planned(self.plan.steps)
        with memory_told(lambda: self.plan, stage, self.built, context):  # where fp8 is tried, a step is computed
            self.engine = engine_of(self.plan, stage, self.built, context)
        self._tell_changes()
        if told := self.built.settle(self.engine, context.folder.trunk(stage)):
            self._note(told)
        best = self.settings.metric_for_best_model if self.settings.load_best_model_at_end else None
        self.measured = Measurements(stage, best)
        self.saved_at, self.seconds_before, self.began = 0, 0.0, time.monotonic()
        self.bad_steps, self.went_back_from = 0, 0
        self.speed: dict[str, Any] = {}
        if resumed is not None:
            self._go_on_from(resumed)

    def run(self) -> dict[str, float | None]:
        """Train to the end, or to the next order to stop; returns the metrics."""
        with memory_told(lambda: self.engine.plan, self.stage, self.built, self.context):
            if self.task.held_out_rows and not self.measured.all:
                self._measure()
            meter = Meter(self.plan.steps, self.plan.global_batch, self.built.flops_per_token, self._peak_flops())
            self.began = time.monotonic()
            with self.stopper.waiting(), self.saver:
                self._train(meter)
                if self._went_back_at_the_end():
                    self._train(meter)
            self._measure_and_save_the_end()
        held_against(self.context, self.stage, self.plan, self.speed)
        return self._finish()

    def _train(self, meter: Meter) -> None:
        """Step to the end of the plan."""
        stragglers, heard = Stragglers(), 0
        for report in self._steps():
            self._tell_step(report, meter)
            self._tell_changes()
            self.saver.make_room(lambda: state.snapshot(self.engine))
            for line in stragglers.look(report.seconds_alone):
                self._note(line)
            if report.health not in ("ok", "overflow"):
                self._skip_or_go_back(report)
            else:
                self._keep(report)
            if self.saver.done() or report.stop_asked:
                self._settle()
            heard += report.stop_asked
            # what a bad step leaves is not saved, but what one more leaves may be
            waits = self.bad_steps and heard == 1 and report.step < self.plan.steps
            if heard and not waits:
                reached = self.engine.cursor.step
                raise Interrupted(f"stopped after step {reached} of {self.plan.steps}; the same command continues")

    def _steps(self) -> Iterator[StepReport]:
        """The engine's steps, one of them watched where the recipe asks for it."""
        steps = self.engine.steps(self.stopper.asked)
        return watched(self.engine, steps, self.context, self.stage) if self.settings.profile_memory else steps

    def _went_back_at_the_end(self) -> bool:
        """Where the last steps were bad, too few to go back for: once, since the weights themselves may be spoilt."""
        end = self.engine.cursor.step
        good = self._newest_step() if self.bad_steps and end > self.went_back_from else None
        if good is None:
            return False
        self._go_back(end, good)
        return True

    def _go_back(self, step: int, good: int) -> None:
        self.went_back_from, self.bad_steps = step, 0
        self._go_on_from(good)
        self._note(f"went back from step {step} to the checkpoint of step {good}")

    def _measure_and_save_the_end(self) -> None:
        """Where the last step was a bad one, the weights before it are the end: they too are measured and saved."""
        if self.task.held_out_rows and not self.measured.has(self.engine.cursor.step):
            self._measure()
        self._save()
        self._settle()

    def _keep(self, report: StepReport) -> None:
        """After a good step: measure and save when it is time, or was at a bad step before it."""
        self.bad_steps = 0
        step, last = report.step, report.step == self.plan.steps
        looked = max(self.measured.last_step(), self.saved_at)  # whoever saved has looked whether to measure
        if self.task.held_out_rows and (last or _is_due(step, self.plan.eval_every, looked)):
            self._measure()
        due = _is_due(step, self.plan.save_every, self.saved_at)
        if last or report.stop_asked or due or self.measured.best_step() == step:
            self._save()

    def _skip_or_go_back(self, report: StepReport) -> None:
        """After a bad step: the weights have not moved; when that does not end it, go back once, then stop."""
        self.bad_steps += 1
        told = (
            f"step {report.step} is skipped: {report.health} (loss {report.loss:.4g}, gradient {report.grad_norm:.4g})"
        )
        self.context.journal.add("skipped", stage=self.stage, step=report.step, health=report.health, message=told)
        if self.bad_steps <= self.settings.max_skipped_steps:
            return
        good = self._newest_step()
        if good is None or report.step <= self.went_back_from:
            raise Diverged(
                f"{self.stage} diverged at step {report.step}: {report.health} {self.bad_steps} steps in a row, "
                + ("again after going back" if good is not None else "and there is no checkpoint to go back to")
                + "; the last good checkpoint is kept. A lower learning_rate is the first thing to try"
            )
        self._go_back(report.step, good)

    def _measure(self) -> None:
        values = self.engine.evaluate()
        self._tell_changes()
        self.context.journal.add("evaluation", stage=self.stage, **self.measured.add(self.engine.cursor.step, values))

    def _save(self) -> None:
        if self.saved_at == self.engine.cursor.step:
            return
        began = time.monotonic()
        self.context.world.beat.at("saving")
        beside = {
            "wishes": self.wishes,
            "global_batch": self.plan.global_batch,
            "evaluations": list(self.measured.all),
            "seconds": self._seconds(),
        }
        self._settle()
        if self.saver.save(state.snapshot(self.engine, **beside), self.measured.best_step()):
            self.context.journal.add(
                "saving", stage=self.stage, step=self.engine.cursor.step, seconds=round(time.monotonic() - began, 3)
            )
        else:
            self._settle()
        self.saved_at = self.engine.cursor.step

    def _settle(self) -> None:
        """Wait for the save under way, and tell of it."""
        if saved := self.saver.settle():
            self.context.journal.add(
                "saved", stage=self.stage, step=saved.step, seconds=round(saved.seconds, 3),
                waited=round(saved.waited, 3), background=saved.background,
            )  # fmt: skip

    def _newest_step(self) -> int | None:
        """The newest good checkpoint, agreed by all ranks."""
        self._settle()

        def look() -> int | None:
            folder = self.checkpoints.newest_good()
            return None if folder is None else int(folder.name.split("-")[1])

        return self.context.world.first(look)

    def _begin_from(self, folder: Path) -> int:
        """Take a checkpoint of another run as this one's first."""

        def take() -> int:
            step = self.checkpoints.take(folder)
            self._note(f"begins from step {step} of {folder} (resume_from_checkpoint)")
            return step

        return self.context.world.first(take)

    def _kept_batch(self, step: int | None) -> int | None:
        """The batch this run was started with; refuses if anything that decides the weights has changed since."""
        if step is None:
            return None
        with state.fitting(self._folder_of(step)):
            kept = read_state(self._folder_of(step))
            kept = {"wishes": dict(kept["wishes"]), "global_batch": int(kept["global_batch"])}
        for change in refuse_changes(kept["wishes"], self.wishes, self.context.orders.overrides):
            self._note(f"goes on although {change}")
        changed_batch = any("batch" in key or "accumulation" in key for key in self.context.orders.overrides)
        return None if changed_batch else int(kept["global_batch"])

    def _go_on_from(self, step: int) -> None:
        with state.fitting(self._folder_of(step)):
            kept = state.restore(self.engine, self._folder_of(step))
            self.measured.all = list(kept["evaluations"])
            self.seconds_before, self.began = float(kept["seconds"]), time.monotonic()
        self.saved_at = step
        self.context.journal.add("resumed", stage=self.stage, step=step, steps=self.plan.steps)

    def _folder_of(self, step: int) -> Any:
        return self.context.folder.checkpoints(self.stage) / f"step-{step:08d}"

    def _best_that_verifies(self) -> int | None:
        """The best step whose checkpoint is still whole; a damaged one is passed over, and said."""
        while (best := self.measured.best_step()) not in (None, self.engine.cursor.step):
            assert best is not None
            if self.context.world.first(lambda best=best: self.checkpoints.at(best) is not None):  # type: ignore[misc]
                return best
            self._note(f"the checkpoint of step {best}, the best, is damaged; the next best is taken")
            self.measured.forget(best)
        return best

    def _peak_flops(self) -> float | None:
        """What all devices together could do."""
        peak = self.context.facts.peak_flops
        return peak * self.context.world.size if peak else None

    def _seconds(self) -> float:
        """Time spent training, earlier starts of this run counted up to the checkpoint they left."""
        return round(self.seconds_before + time.monotonic() - self.began, 2)

    def _finish(self) -> dict[str, float | None]:
        """Take the best weights, write the model folder, and only then the result that says the stage is done."""
        best = self._best_that_verifies()
        if best is not None and best != self.engine.cursor.step:
            state.restore_weights(self.engine, self._folder_of(best))
            self._note(f"the weights of step {best} have the best {self.settings.metric_for_best_model} and are kept")
        self.engine.average.settle()
        metrics = {
            **self.measured.metrics(self.engine.cursor.step if best is None else best),
            "steps": self.engine.cursor.step,
            "tokens": self.engine.cursor.tokens,
            "trained_tokens": self.engine.cursor.trained_tokens,
            "seconds": self._seconds(),
        }
        self.context.world.beat.at("saving")
        weights = {}
        for name, tensor in self.built.model.state_dict().items():
            full = whole(tensor)  # every rank must ask; only the main one keeps it
            if self.context.world.is_main:
                weights[name] = full.cpu()
        self.context.world.first(lambda: self._write_result(weights, metrics))
        return metrics

    def _write_result(self, weights: dict[str, Any], metrics: dict[str, float | None]) -> None:
        folder = self.context.folder.model(self.stage)
        self.built.save(weights, folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
        files = {str(path.relative_to(folder)): hash_file(path) for path in paths}
        result = {"metrics": metrics, "wishes": self.wishes, "plan": self.plan.as_json(), "files": files}
        write_sealed(self.context.folder.result(self.stage), result)
        shutil.rmtree(self.context.folder.trunk(self.stage), ignore_errors=True)  # nothing needs it any more

    def _tell_model_and_data(self, found: Ingredients) -> None:
        share, facts = self.built.share, self.built.data_facts
        self.context.journal.add(
            "model", stage=self.stage, name=found.model_name, revision=found.revision, share=str(share),
            trained_parameters=share.trained, parameters=share.total,
        )  # fmt: skip
        self.context.journal.add("data", stage=self.stage, **facts)
        self.context.world.first(lambda: write_json(self.context.folder.data_manifest(self.stage), facts))

    def _tell_plan(self) -> None:
        told = self.plan.as_json()
        self.context.journal.add("plan", stage=self.stage, device=self.context.facts.name, **told)
        path = self.context.folder.plan

        def write() -> None:
            write_json(path, {**(read_json(path) if path.exists() else {}), self.stage: told})

        self.context.world.first(write)

    def _tell_step(self, report: StepReport, meter: Meter) -> None:
        meter.record(report)
        if report.step % self.settings.logging_steps == 0 or report.step in (1, self.plan.steps):
            self.speed = meter.told()
            self.context.journal.add(
                "step", stage=self.stage, step=report.step, steps=self.plan.steps, epoch=round(report.epoch, 4),
                loss=report.loss, grad_norm=report.grad_norm, learning_rate=report.learning_rate, tokens=report.tokens,
                batch=report.batch, seconds=round(report.seconds, 4), health=report.health, **self.speed,
            )  # fmt: skip

    def _tell_changes(self) -> None:
        """What the engine had to do otherwise than planned."""
        while self.engine.changes:
            self._note(self.engine.changes.pop(0))
        if self.plan is not self.engine.plan:
            self.plan = self.engine.plan
            self._tell_plan()

    def _note(self, line: str) -> None:
        self.context.journal.add("note", stage=self.stage, message=line)


def _is_due(step: int, every: int, last: int) -> bool:
    """Whether a multiple of so many steps was passed since the last time."""
    return step // every > last // every
