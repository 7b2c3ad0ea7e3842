"""Two runs in one folder, and a run that goes on with other wishes than it was started with."""

from __future__ import annotations

import json
import time

from tests.faults.fault import Bench, Fault, Outcome, counted, inject
from tests.faults.rig import trace, wait_for_step

CHANGES = (
    ("learning rate", ("--set", "sft.learning_rate=5e-4"), "sft.learning_rate was 0.001, now 0.0005"),
    ("batch", ("--set", "sft.gradient_accumulation_steps=4"), "sft.gradient_accumulation_steps was 2, now 4"),
    ("steps", ("--set", "sft.max_steps=20"), "sft.max_steps was 12, now 20"),
    ("rows", (), "data.fingerprint changed"),
    ("seed", ("--set", "seed=7"), "seed was"),
    ("model", (), "model.fingerprint changed"),
)
"""What is changed, how, and the words by which it must be named."""


def two_at_once(bench: Bench) -> Outcome:
    """R18: a second process in the folder of a running one."""
    whole, folder = bench.reference(), bench.place("two")
    recipe = bench.recipe(folder)
    running = bench.rig.start(
        ["run", str(recipe)], folder, first=(*bench.worse, inject("slow_steps", seconds=0.4, after=2))
    )
    wait_for_step(folder / "run", 2)
    began = time.monotonic()
    code, output = bench.run(recipe)
    seconds = time.monotonic() - began
    unharmed = running.wait() == 0 and trace(folder / "run") == whole
    figure = f"refused with {code} in {seconds:.1f} s; the first is {'unharmed' if unharmed else 'harmed'}"
    met = code == 77 and seconds < bench.limit(5) and unharmed and "is in use by process" in output
    numbers = {"seconds": round(seconds, 2), "exit_code": code, "unharmed": unharmed}
    return Outcome(figure, met, numbers, None, () if met else (output[-300:],))


def other_wishes(bench: Bench) -> Outcome:
    """R20: going on with another learning rate, batch, length, seed, other rows, another model."""
    good, notes, changes = 0, [], CHANGES[:: 3 if bench.smoke else 1]
    for what, words, named in changes:
        folder = bench.place("wishes")
        recipe = bench.recipe(folder)
        bench.run(recipe, first=[inject("die_at_step", step=8)])
        if what == "rows":
            with (folder / "rows.jsonl").open("a", encoding="utf-8") as rows:
                rows.write(json.dumps({"prompt": "One more?", "completion": "One more."}) + "\n")
        if what == "model":
            words = ("--set", f"model.model_name_or_path={_other_model(bench)}")
        code, output = bench.run(recipe, *words)
        refused = code == 77 and named in output
        good += refused
        if not refused:
            notes.append(f"{what}: exit {code}: {output.strip()[-200:]}")
    figure = counted(good, len(changes), "changes refused by name (exit 77)")
    return Outcome(figure, good == len(changes), {"changes": len(changes), "refused": good}, None, tuple(notes))


def _other_model(bench: Bench) -> str:
    """The same model with one bit of one weight different."""
    import shutil

    from tests.faults.harm import flip_at

    folder = bench.folder / "other-model"
    shutil.copytree(bench.model, folder, dirs_exist_ok=True)
    flip_at(0.5)(folder / "model.safetensors")
    return str(folder)


FAULTS = (
    Fault("R18", "two runs in one folder", "the same command while the first is running",
          "the second refused in 5 s, the first unharmed",
          "HF Trainer: both exit 0 and delete each other's checkpoints (measured Nov 2026)", two_at_once, 6),
    Fault("R20", "other wishes on resume", "learning rate, batch, steps, seed, rows, model changed after a kill",
          "100 % refused by name", "HF Trainer: 0 of 4, one with a warning (measured Nov 2026)", other_wishes, 12),
)  # fmt: skip
