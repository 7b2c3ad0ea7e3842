"""The planner against the machine: predict memory and speed of many trainings, then measure each by the real engine."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from modelwright.bench.judge import accelerate_bytes, fit, judge, lines, most_rows
from modelwright.bench.random_rows import RandomRows, random_images
from modelwright.bench.settings import CPU_HELD_OUT, CPU_SETTINGS, GPU_SETTINGS, HELD_OUT, Setting
from modelwright.errors import UsageError
from modelwright.plan.calibration import OWN, calibration_for
from modelwright.plan.facts import Facts, card
from modelwright.plan.shapes import KNOWN
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import write_json

__all__ = ["judged", "keep", "lines", "measure", "read_runs"]

STEPS, WARM_UP, SEED = 12, 6, 42
WANTED = "it wants a runs.json that bench plan --into FOLDER has written"


def measure(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every setting, fit the coefficients to those that are not held out, and judge all."""
    runs = measure_all(wanted, into)
    return judged(runs)


def judged(runs: dict[str, Any]) -> dict[str, Any]:
    """Measured runs with predictions before and after the coefficients were fitted to them."""
    gpu = card(Facts(**runs["device"]))
    before = calibration_for(gpu)
    after = fit(runs["runs"], gpu, before)
    told = {**runs, "before": judge(runs["runs"], gpu, before), "judged": judge(runs["runs"], gpu, after)}
    return {**told, "calibration": {after.card: after.as_json()}}


def read_runs(path: Path) -> dict[str, Any]:
    """What an earlier measurement wrote with --into."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--from {path} could not be read ({reason}); {WANTED}") from None
    if not isinstance(told, dict) or not {"device", "runs"} <= told.keys():
        raise UsageError(f"--from {path} holds no measured runs; {WANTED}")
    return told


def keep(figures: dict[str, Any]) -> Path:
    """Keep the fitted coefficients for the plans of this machine."""
    path = cache_dir() / OWN
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**known, **figures["calibration"]})
    return path


def measure_all(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every setting, each guarded, and write what is known after each one."""
    import torch

    from modelwright.plan.facts import probe

    on_gpu, facts = torch.cuda.is_available(), probe()
    chosen = (*GPU_SETTINGS, *HELD_OUT) if on_gpu else (*CPU_SETTINGS, *CPU_HELD_OUT)
    held_out = {setting.name for setting in (*HELD_OUT, *CPU_HELD_OUT)}
    runs: list[dict[str, Any]] = []
    for setting in chosen:
        if wanted and not any(word in setting.name for word in wanted):
            continue
        began = time.perf_counter()
        setting = setting if setting.rows else replace(setting, rows=most_rows(setting, card(facts)))
        try:
            run = measure_one(setting)
            run["accelerate_bytes"] = accelerate_bytes(setting, run["plan"]["precision"])
        except Exception as error:  # one setting that fails must not take the others with it
            run = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        seconds = round(time.perf_counter() - began, 1)
        runs.append({"setting": asdict(setting), "held_out": setting.name in held_out, "took": seconds, **run})
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        if into is not None:
            write_json(into / "runs.json", {"device": asdict(facts), "runs": runs})
    return {"device": asdict(facts), "runs": runs}


def measure_one(setting: Setting) -> dict[str, Any]:
    """A few steps of the real engine: the peak of memory, and the median step once everything is warm."""
    import torch

    from modelwright.engine.loop import Engine
    from modelwright.engine.world import World
    from modelwright.plan.facts import probe
    from modelwright.plan.stage import plan_stage

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.manual_seed(SEED)
    task, settings = _task(setting, device)
    plan = plan_stage(settings, task.rows, 1, probe())
    engine = Engine(task, settings, plan, World(device=device), SEED)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks, tokens, steps = [time.perf_counter()], [], engine.steps()
    for _ in range(1, STEPS):
        tokens.append(next(steps).tokens)
        marks.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(marks)][WARM_UP:]
    found: dict[str, Any] = {
        "plan": plan.as_json(),
        "step_seconds": [round(value, 6) for value in seconds],
        "warm_up_seconds": round(marks[WARM_UP] - marks[0], 3),
        "tokens_per_step": tokens[-1],
        "tokens_per_second": round(tokens[-1] / median(seconds), 2),
        "trained": sum(weight.numel() for weight in engine.weights.values()),
    }
    return {**found, **(_device_peak(steps) if on_gpu else _watched_peak(engine, steps))}


def _device_peak(steps: Any) -> dict[str, int]:
    """What the allocator of the GPU has seen since the first step."""
    import torch

    next(steps)
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "steady_bytes": torch.cuda.memory_allocated(),
    }


def _watched_peak(engine: Any, steps: Any) -> dict[str, Any]:
    """On a CPU: the bytes of all tensors, watched over one more step."""
    from modelwright.engine.profile import Profiler

    profiler = Profiler(engine.task.module, engine.optimizer)
    with profiler.watching():
        next(steps)
    told = profiler.as_json()
    return {"peak_bytes": told["peak_bytes"], "parts": told["parts"]}


def _task(setting: Setting, device: Any) -> tuple[Any, Any]:
    """The task of a setting over random rows, and the settings of its stage."""
    from modelwright.recipe.schema import Classify, Dpo, Sft

    kind: Any = {"sft": Sft, "dpo": Dpo, "classify": Classify}[setting.stage]
    known = {name: value for name, value in setting.settings.items() if name in kind.model_fields}
    settings = kind(
        per_device_train_batch_size=setting.rows,
        max_steps=STEPS,
        lr_scheduler_type="constant",
        learning_rate=1e-5,
        **known,
    )
    if setting.stage == "classify":
        return random_images(setting.rows * 8, setting.smaller.get("width", 64), settings), settings
    model = _model(setting, settings, device)
    words = model.config.get_text_config().vocab_size
    rows = setting.rows * settings.gradient_accumulation_steps
    return RandomRows(model, settings, (rows, setting.length, words)), settings


def _model(setting: Setting, settings: Any, device: Any) -> Any:
    """A model of the setting's shape with random weights, made ready as a stage makes it."""
    import torch
    from transformers import AutoModelForCausalLM

    from modelwright.models import text, trainable
    from modelwright.models.quiet import be_quiet

    be_quiet()
    config = config_of(setting)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    text.move(model, device, "auto")
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing:
        trainable.recompute_activations(model)
    return model.to(device)


def config_of(setting: Setting) -> Any:
    """The transformers config of a setting's shape."""
    from transformers import CONFIG_MAPPING

    told = {**KNOWN[setting.model], **setting.smaller}
    family = str(told.pop("model_type"))
    if family == "gpt_neox":
        told = {key: value for key, value in told.items() if key not in ("num_key_value_heads", "head_dim")}
    told["max_position_embeddings"] = max(setting.length, 512)
    return CONFIG_MAPPING[family](**told, bos_token_id=0, eos_token_id=0, pad_token_id=0)
