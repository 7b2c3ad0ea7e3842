"""The same faults injected into the HF Trainer on the same machine, for comparison; None where it is not installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import installed
from tests.faults.context import FaultContext, questions
from tests.faults.fork_server import ForkedProcess, ForkServer, RemoteCall
from tests.faults.injections import delete, empty, flip_at, truncate

STEPS, SAVE_EVERY = 24, 5
IN_SAVE = ("_save_optimizer_and_scheduler", "half an optimizer", "_save_scaler", "_save_rng_state")
"""Moments of its save: after the weights, inside the optimizer's file, after it, after the random numbers."""
PRELOAD = ("transformers.models.llama.modeling_llama", "transformers.trainer", "tests.faults.hf_trainer")


class HfTrainerRuns:
    """Runs of the HF Trainer, forked like ours."""

    def __init__(self, context: FaultContext) -> None:
        self._context, self._rig = context, ForkServer(PRELOAD)
        self._reference: dict[int, dict[str, Any]] = {}

    def start(self, folder: Path, **options: Any) -> ForkedProcess:
        """Start its training in a folder."""
        call = RemoteCall("tests.faults.hf_trainer", "train", (str(folder), str(self._context.model)), options)
        return self._rig.fork(call, folder)

    def run(self, folder: Path, **options: Any) -> int:
        """Train to the end; the exit code."""
        return self.start(folder, **options).wait()

    def reference(self, save_every: int) -> dict[str, Any]:
        """The result of a run without faults, and how long it takes."""
        if save_every not in self._reference:
            folder, began = self._context.fresh_folder("peer-whole"), time.monotonic()
            if self.run(folder, save_every=save_every):
                raise RuntimeError("the HF Trainer could not train the tiny model")
            self._reference[save_every] = {**result(folder), "seconds": time.monotonic() - began}
        return self._reference[save_every]

    def equals_reference(self, folder: Path, save_every: int = SAVE_EVERY) -> bool:
        """Whether a run ended as the reference run did."""
        one, other = result(folder), self.reference(save_every)
        return bool(one["weights"] == other["weights"] and one["losses"] == other["losses"])

    def killed_run(self) -> Path:
        """A folder whose run was killed at step 13, with checkpoints of steps 5 and 10."""

        def stop() -> Path:
            folder = self._context.fresh_folder("peer-stopped")
            self.run(folder, fault="die", at=13)
            return folder

        return self._context.cached("peer stopped", stop)

    def close(self) -> None:
        """End its interpreter."""
        self._rig.close()


def result(folder: Path) -> dict[str, Any]:
    """The result of a run of the peer."""
    outcomes: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return outcomes


def hf_trainer_runs(context: FaultContext) -> HfTrainerRuns | None:
    """The peer, where it is installed and not disabled."""
    if not context.run_peers or installed("accelerate") is None:
        return None

    def start() -> HfTrainerRuns:
        runs = HfTrainerRuns(context)
        context.cleanups.append(runs.close)
        return runs

    return context.cached("peer", start)


def peer_figure(text: str) -> str:
    """A figure of the peer, with its version."""
    return f"HF Trainer {installed('transformers')}: {text}"


def random_kills(context: FaultContext, identical: bool = False) -> str | None:
    """SIGKILL at random moments, with checkpoints as often as ours."""
    if (peer := hf_trainer_runs(context)) is None:
        return None

    def kill() -> tuple[int, int, int]:
        rng, seconds = context.rng("peer"), peer.reference(2)["seconds"]
        landed = resumed = same = 0
        for _ in range(28):
            folder = context.fresh_folder("peer-kill")
            trial = peer.start(folder, save_every=2)
            time.sleep(rng.uniform(0.02, seconds))
            if not trial.kill():
                continue
            landed += 1
            if peer.run(folder, save_every=2) == 0:
                resumed += 1
                same += result(folder)["weights"] == peer.reference(2)["weights"]
            if landed == 14:
                break
        return landed, resumed, same

    landed, resumed, same = context.cached("peer kills", kill)
    return peer_figure(
        f"{same} of {landed} runs with equal weights" if identical else f"{resumed} of {landed} runs resumed"
    )


def kills_in_save(context: FaultContext) -> str | None:
    """A kill at four moments of a save."""
    if (peer := hf_trainer_runs(context)) is None:
        return None
    good = 0
    for moment in range(len(IN_SAVE)):
        folder = context.fresh_folder("peer-save")
        peer.run(folder, fault="kill in save", at=moment)
        good += peer.run(folder) == 0
    return peer_figure(f"{good} of {len(IN_SAVE)} runs resumed")


def flipped_bits(context: FaultContext) -> str | None:
    """A bit in the middle of the newest checkpoint's weights and optimizer."""
    names = ("model.safetensors", "optimizer.pt")
    noticed = _after_damage(context, [(name, flip_at(0.5)) for name in names])
    if noticed is None:
        return None
    return peer_figure(f"{sum(code != 0 for code, _ in noticed)} of {len(names)} flips noticed")


def truncated_files(context: FaultContext) -> str | None:
    """Files of the newest checkpoint cut, emptied and deleted."""
    acts = [("model.safetensors", truncate), ("optimizer.pt", truncate), ("scheduler.pt", empty),
            ("trainer_state.json", delete), ("optimizer.pt", delete)]  # fmt: skip
    outcomes = _after_damage(context, acts)
    return (
        None if outcomes is None else peer_figure(f"{sum(same for _, same in outcomes)} of {len(acts)} runs recovered")
    )


def _after_damage(context: FaultContext, acts: list[tuple[str, Any]]) -> list[tuple[int, bool]] | None:
    """Exit code after each damage, and whether the run then ended as the reference run."""
    if (peer := hf_trainer_runs(context)) is None:
        return None
    outcomes = []
    for name, act in acts:
        folder = context.fresh_folder("peer-damaged")
        shutil.copytree(peer.killed_run() / "out", folder / "out")
        act(folder / "out/checkpoint-10" / name)
        code = peer.run(folder)
        outcomes.append((code, code == 0 and peer.equals_reference(folder)))
    return outcomes


def nan_weight(context: FaultContext) -> str | None:
    """A weight that is NaN from step 12 on."""
    if (peer := hf_trainer_runs(context)) is None:
        return None
    folder = context.fresh_folder("peer-nan")
    code = peer.run(folder, fault="nan", at=12)
    if code:
        return peer_figure(f"exit {code}")
    weights = "finite" if result(folder)["finite"] else "NaN"
    return peer_figure(f"exit 0, {weights} weights saved")


def restart_finished(context: FaultContext) -> str | None:
    """The same script once more after it has finished."""
    if (peer := hf_trainer_runs(context)) is None:
        return None
    folder = context.fresh_folder("peer-again")
    peer.run(folder, save_every=6)
    step = result(folder)["step"]
    code = peer.run(folder, save_every=6)
    extra = result(folder)["step"] - step
    return peer_figure(f"{extra} extra step{'s' * (extra != 1)}" if code == 0 else f"exit {code}")


def sigterm(context: FaultContext) -> str | None:
    """SIGTERM in the middle, with default settings."""
    if (peer := hf_trainer_runs(context)) is None:
        return None
    folder = context.fresh_folder("peer-asked")
    trial = peer.start(folder, save_every=100)
    reached, deadline = 0, time.monotonic() + 60
    while reached < 7 and time.monotonic() < deadline:
        time.sleep(0.005)
        reached = _reached(folder)
    os.kill(trial.pid, signal.SIGTERM)
    code = trial.wait()
    saved = [int(path.name.split("-")[1]) for path in (folder / "out").glob("checkpoint-*")]
    return peer_figure(f"{_reached(folder) - max(saved, default=0)} steps lost, exit {code}")


def _reached(folder: Path) -> int:
    try:
        return int((folder / "reached").read_text(encoding="utf-8") or 0)
    except (OSError, ValueError):
        return 0


def train(folder: str, model: str, fault: str = "", at: int = 0, save_every: int = SAVE_EVERY) -> None:
    """Train or resume from the newest checkpoint, as its users' scripts do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    output = Path(folder) / "out"
    settings = TrainingArguments(
        output_dir=str(output), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-3,
        save_steps=save_every, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=42,
        lr_scheduler_type="cosine", save_total_limit=2,
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=settings,
        train_dataset=_dataset(AutoTokenizer.from_pretrained(model)),
        callbacks=[_callback(Path(folder), fault, at)],
    )
    if fault == "kill in save":
        _kill_in_save(trainer, at)
    last = get_last_checkpoint(str(output)) if output.is_dir() else None
    output = trainer.train(resume_from_checkpoint=last)
    weights = hashlib.sha256()
    finite = True
    for name, tensor in sorted(trainer.model.state_dict().items()):
        weights.update(name.encode() + tensor.numpy().tobytes())
        finite = finite and bool(tensor.isfinite().all())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"step": trainer.state.global_step, "losses": losses, "weights": weights.hexdigest(), "finite": finite,
            "train_loss": output.training_loss, "resumed": last is not None}  # fmt: skip
    (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _dataset(tokenizer: Any) -> list[dict[str, Any]]:
    """Questions and answers as one text each, all of one length."""
    rows = []
    for row in questions(40):
        tokens = tokenizer(f"{row['prompt']} {row['completion']}", padding="max_length", truncation=True, max_length=48)
        labels = [
            t if attended else -100 for t, attended in zip(tokens["input_ids"], tokens["attention_mask"], strict=True)
        ]
        rows.append({"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "labels": labels})
    return rows


def _callback(folder: Path, fault: str, at: int) -> Any:
    """Writes down the step, and injects the fault at one."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step + 1 == at and fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if state.global_step + 1 == at and fault == "nan":
                next(more["model"].parameters()).data.view(-1)[0] = float("nan")

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            (folder / "reached").write_text(str(state.global_step), encoding="utf-8")

    return Watch()


def _kill_in_save(trainer: Any, moment: int) -> None:
    """SIGKILL at one moment of the second save."""
    name = IN_SAVE[moment]
    method = "_save_scaler" if name.startswith("half") else name
    real: Callable[[str], None] = getattr(trainer, method)

    def dying(output_dir: str) -> None:
        if trainer.state.global_step == 2 * trainer.args.save_steps:
            if name.startswith("half"):
                path = Path(output_dir, "optimizer.pt")
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        real(output_dir)

    setattr(trainer, method, dying)
