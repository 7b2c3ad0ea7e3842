"""Numbers that are none, batches unlike all others, and weights that were corrupted in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults import baseline
from tests.faults.fault import Bench, Fault, Outcome, counted, inject
from tests.faults.rig import Call, told

LONG: dict[str, Any] = {"max_steps": 30, "save_steps": 3, "eval_steps": 30}
"""Long enough for the guard to know what is usual."""
NEAR = 0.05
"""How far from the clean run's loss a run may end."""


def not_a_number(bench: Bench) -> Outcome:
    """R10: a weight that turns into no number at a random step, and does so again after rolling back."""
    draw, count = bench.draw("R10"), bench.trials(4, 1)
    slowest, bad_files, opened, codes, notes = 0, 0, 0, [], []
    for _ in range(count):
        step, folder = draw.randint(4, 11), bench.place("nan")
        gate = ["--set", "gates={sft: {eval_loss: {at_most: 99}}}"]
        code, output = bench.run(bench.recipe(folder), *gate, first=[inject("poison_weight", step=step, times=99)])
        codes.append(code)
        skipped = [event["step"] for event in told(folder / "run", "step_skipped")]
        slowest = max(slowest, (skipped[0] - step + 1) if skipped else 999)
        bad_files += files_with_nan(bench, folder / "run")
        opened += _is_open(folder / "run/gates/sft.json") or (folder / "run/best_model").exists()
        if code != 76:
            notes.append(f"seed {bench.seed}, step {step}: exit {code}: {output.strip()[-200:]}")
    figure = f"noticed in {slowest} step, {bad_files} files with NaN, {opened} gates opened, exit {_all(codes)}"
    met = slowest <= 1 and not bad_files and not opened and set(codes) == {76}
    numbers = {"trials": count, "steps_to_react": slowest, "files_with_nan": bad_files, "gates_opened": opened}
    return Outcome(figure, met, numbers, baseline.not_a_number(bench), tuple(notes))


def spikes(bench: Bench) -> Outcome:
    """R11: one bad batch, or all weights thirtyfold; the loss in the end beside that of an untouched run."""
    clean = bench.reference(**LONG)["metrics"]["eval_loss"]
    draw, count = bench.draw("R11"), bench.trials(4, 1)
    kinds = [("one batch with 50 times the loss", "bad_batch"), ("all weights 30 times as large", "grow_weights")]
    good, of, farthest, notes = 0, 0, 0.0, []
    for word, function in kinds:
        for _ in range(count):
            step, folder = draw.randint(18, 29), bench.place("spike")
            code, output = bench.run(bench.recipe(folder, **LONG), first=[inject(function, step=step)])
            of += 1
            loss = _eval_loss(folder / "run") if code == 0 else None
            distance = abs(loss - clean) / clean if loss is not None else 9.99
            farthest = max(farthest, distance)
            good += distance <= NEAR
            if distance > NEAR:
                notes.append(f"seed {bench.seed}, {word} at step {step}: exit {code}, loss {loss}: {output[-200:]}")
    figure = counted(good, of, f"end within {NEAR:.0%} of the clean loss; the farthest is {farthest:.2%} off")
    numbers = {"trials": of, "good": good, "farthest": round(farthest, 5)}
    return Outcome(figure, good == of, numbers, None, tuple(notes))


def files_with_nan(bench: Bench, run: Path) -> int:
    """Safetensors files of a run that hold a number that is none; read in another process, since it wants torch."""
    answer = run / "not-finite.json"
    call = Call("tests.faults.numbers", "count_not_finite", (str(run), str(answer)))
    trial = bench.rig.fork(call, run)
    if trial.wait():
        raise RuntimeError(trial.output)
    return int(json.loads(answer.read_text(encoding="utf-8")))


def count_not_finite(run: str, answer: str) -> None:
    """Count the files and write the number down."""
    import torch
    from safetensors.torch import load_file

    files = list(Path(run).rglob("*.safetensors"))
    bad = [path for path in files if not all(bool(torch.isfinite(t).all()) for t in load_file(path).values())]
    Path(answer).write_text(json.dumps(len(bad)), encoding="utf-8")


def _eval_loss(run: Path) -> float:
    result = json.loads((run / "stages/sft/result.json").read_text(encoding="utf-8"))
    return float(result["metrics"]["eval_loss"])


def _is_open(gate: Path) -> bool:
    return gate.exists() and bool(json.loads(gate.read_text(encoding="utf-8"))["open"])


def _all(codes: list[int]) -> str:
    return ", ".join(str(code) for code in sorted(set(codes)))


FAULTS = (
    Fault("R10", "a weight turns into NaN", "one weight set to NaN before a random step, again after rolling back",
          "noticed within 1 step, 0 NaN checkpoints, no gate opens",
          "HF Trainer: never noticed, exit 0, all tensors NaN, a lower loss (measured Nov 2026)", not_a_number, 8),
    Fault("R11", "a spike, or corrupted weights", "loss × 50 in one batch; all weights × 30, at a random step",
          "100 % end within 5 % of the clean loss", "HF Trainer: 0, it ends 70 times as high (measured Nov 2026)",
          spikes, 25),
)  # fmt: skip
