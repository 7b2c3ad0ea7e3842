"""The HF Trainer on trial: called in a forked process, it tunes the same tiny model on the same rows."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.fault import questions

STEPS, SAVE_EVERY = 24, 5
IN_SAVE = ("_save_optimizer_and_scheduler", "half an optimizer", "_save_scaler", "_save_rng_state")
"""Moments of its save: after the weights, inside the optimizer's file, after it, after the random numbers."""


def train(folder: str, model: str, fault: str = "", at: int = 0, save_every: int = SAVE_EVERY) -> None:
    """Train or go on, as scripts of its users do: from the newest checkpoint where there is one."""
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
        train_dataset=_rows(AutoTokenizer.from_pretrained(model)),
        callbacks=[_callback(Path(folder), fault, at)],
    )
    if fault == "kill in save":
        _kill_in_save(trainer, at)
    last = get_last_checkpoint(str(output)) if output.is_dir() else None
    found = trainer.train(resume_from_checkpoint=last)
    weights = hashlib.sha256()
    finite = True
    for name, tensor in sorted(trainer.model.state_dict().items()):
        weights.update(name.encode() + tensor.numpy().tobytes())
        finite = finite and bool(tensor.isfinite().all())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = {"step": trainer.state.global_step, "losses": losses, "weights": weights.hexdigest(), "finite": finite,
            "train_loss": found.training_loss, "resumed": last is not None}  # fmt: skip
    (Path(folder) / "result.json").write_text(json.dumps(told), encoding="utf-8")


def _rows(tokenizer: Any) -> list[dict[str, Any]]:
    """Questions and answers as one text each, all of one length."""
    rows = []
    for row in questions(40):
        tokens = tokenizer(f"{row['prompt']} {row['completion']}", padding="max_length", truncation=True, max_length=48)
        labels = [t if seen else -100 for t, seen in zip(tokens["input_ids"], tokens["attention_mask"], strict=True)]
        rows.append({"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "labels": labels})
    return rows


def _callback(folder: Path, fault: str, at: int) -> Any:
    """Writes down how far it is, and does what is to be done at a step."""
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
    """Be killed at one moment of the second save."""
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
