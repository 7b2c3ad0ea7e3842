"""Does a GPU give the same bits twice, and after SIGKILL at random moments? What do deterministic kernels cost?

    python -m tests.faults.gpu repeat    each trial trained twice in this process: equal losses and weights?
    python -m tests.faults.gpu kills     real commands, killed and resumed, compared with one that was not killed
    python -m tests.faults.gpu cost      seconds of a step with deterministic: false, true, true, false

A trial is a model, a setting and the length of a shared system prompt. Each mode ends with a table within --seconds and
says with which --first the next call continues. `--device cpu` tries the command itself, with a tiny model.

Random weights of real shapes; rows of the lengths in row-lengths.json (MODELWRIGHT_SHARED), filled with numbers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.common import Json, Save, free_device, report
from benchmarks.common import run as run_command
from benchmarks.mixed_lengths import SHAPES, WORDS, save_number_tokenizer
from benchmarks.tables import markdown_table
from benchmarks.workloads import random_model
from modelwright.errors import UsageError
from modelwright.runs import journal

SEED = 20261117
MODELS = ("pythia-410m", "llama-3.2-1b", "gemma-3-270m")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared prefix": ("sft", {}),
    "padded": ("sft", {"share_prefix": False}),
    "packed": ("sft", {"packing": True}),
    "compiled": ("sft", {"torch_compile": True}),
    "compiled + packed": ("sft", {"torch_compile": True, "packing": True}),
    "CUDA graphs": ("sft", {"cuda_graphs": "always"}),
    "LoRA": ("sft", {"trainable": "lora"}),
    "QLoRA": ("sft", {"trainable": "lora", "quantization": "nf4"}),
    "DPO": ("dpo", {}),
    "frozen-layer cache": (
        "sft", {"trainable": {"last_layers": 2, "norms": False, "lm_head": True, "untie_lm_head": True}}
    ),
    "fp8": ("sft", {"precision": "fp8", "fp8_validation": "off", "packing": True}),
    "fp32": ("sft", {"precision": "fp32"}),
    "vision": ("classify", {}),
}  # fmt: skip
"""The stage and its settings beside the defaults."""
KILLED = ("padded", "packed", "compiled", "LoRA", "DPO", "frozen-layer cache")
EQUAL_LENGTHS = ("CUDA graphs",)
"""Settings whose rows have one length: a graph is captured after three steps of one shape."""
PREFIXES = {"20": 20, "300": 300, "none": 0}


class Mode(StrEnum):
    """What is measured."""

    REPEAT = "repeat"
    KILLS = "kills"
    COST = "cost"


class Trial(NamedTuple):
    """One line of the table."""

    model: str
    setting: str
    prefix: str

    @property
    def name(self) -> str:
        """Its name in the table."""
        is_text = SETTINGS[self.setting][0] != "classify"
        return f"{self.model}, {self.setting}, prefix {self.prefix}" if is_text else self.setting


class Workspace:
    """Models, rows and recipes of the trials in a temporary folder."""

    def __init__(self, folder: Path, device: str, changes: dict[str, Any]) -> None:
        self.folder, self.is_small, self.changes = folder, device == "cpu", changes
        self.max_length = 256 if self.is_small else 2048
        self._save_rows(64 if self.is_small else 1024)

    def recipe(self, trial: Trial, **changes: Any) -> Path:
        """The recipe of a trial; its model is created once."""
        stage, settings = SETTINGS[trial.setting]
        settings = {**self.changes, **settings, **changes}
        model: dict[str, Any] = {"model_name_or_path": str(self.folder / trial.model)}
        if stage == "classify":
            model = {"model_name_or_path": "resnet18", **({"resnet_width": 8} if self.is_small else {})}
            settings |= {} if self.is_small else {"per_device_train_batch_size": 512}
            data: dict[str, Any] = {"dataset_name": "shapes"}
        else:
            settings = {"max_length": self.max_length, "learning_rate": 1e-4, **settings}
            rows = "equal" if trial.setting in EQUAL_LENGTHS else stage
            data = {"train_file": str(self.folder / f"{rows}.jsonl"), "test_size": 4}
            if length := PREFIXES[trial.prefix]:
                data["system_prompt"] = _words(random.Random(length), min(length, self.max_length // 4))
            if not (self.folder / trial.model).exists():
                self._save_model(trial.model)
        path = self.folder / "recipe.yaml"
        path.write_text(
            json.dumps({"name": "bits", "model": model, "data": data, "report_to": "none", stage: settings})
        )
        return path

    def _save_model(self, shape: str) -> None:
        """A model of the shape with random weights, and a tokenizer whose words are numbers: lengths are exact."""
        tokenizer, (model_type, sizes) = save_number_tokenizer(self.folder / shape), SHAPES[shape]
        device = "cpu" if self.is_small else "cuda"
        random_model(model_type, sizes, device, tokenizer).to("cpu").save_pretrained(self.folder / shape)

    def _save_rows(self, count: int) -> None:
        """Questions and answers, preference pairs whose rejected answer is that of another row, rows of one length."""
        rng, divisor = random.Random(SEED), 8 if self.is_small else 1
        lengths = [(max(2, a // divisor), max(2, b // divisor)) for a, b in row_lengths(count)]
        texts = [tuple(_words(rng, length) for length in pair) for pair in lengths]
        rows: dict[str, list[dict[str, str]]] = {
            "sft": [{"prompt": prompt, "completion": answer} for prompt, answer in texts],
            "dpo": [
                {"prompt": prompt, "chosen": answer, "rejected": texts[index - 1][1]}
                for index, (prompt, answer) in enumerate(texts)
            ],
            "equal": [{"prompt": _words(rng, 60), "completion": _words(rng, 120)} for _ in texts],
        }
        for name, lines in rows.items():
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def row_lengths(count: int) -> list[tuple[int, int]]:
    """Lengths of real prompts and answers in tokens, every sixteenth row ten times as long, up to 2,048 in all."""
    path = Path(os.environ.get("MODELWRIGHT_SHARED", "../shared")) / "data" / "row-lengths.json"
    rng = random.Random(SEED)
    if path.exists():
        pairs = json.loads(path.read_text())["rows"][:count]
    else:
        pairs = [(rng.randrange(20, 200), rng.randrange(20, 250)) for _ in range(count)]
    factors = [10 if index % 16 == 0 else 1 for index in range(count)]
    return [
        (min(600, prompt * by), min(1100, answer * by)) for (prompt, answer), by in zip(pairs, factors, strict=True)
    ]


def train(path: Path, run: Path) -> dict[str, Any]:
    """Train in this process as `modelwright run` does, without checkpoints and without saving the model."""
    from modelwright.engine.distributed import init_distributed
    from modelwright.recipe.load import load
    from modelwright.runs.folder import RunFolder
    from modelwright.stages.context import DEFAULT_OPTIONS, GracefulShutdown, RunContext
    from modelwright.stages.pipeline import _common_hardware
    from modelwright.stages.specs import BUILDERS
    from modelwright.stages.stage_runner import StageRunner

    shutil.rmtree(run, ignore_errors=True)
    loaded = load(path, [f"output_dir={run}"])
    folder, (stage, *_) = RunFolder(run), loaded.recipe.stages
    folder.create()
    with init_distributed() as world:
        events = journal.Journal(None)
        context = RunContext(loaded, folder, events, world, _common_hardware(world), DEFAULT_OPTIONS)
        builder = BUILDERS[stage]
        runner = StageRunner(context, builder, builder.load_inputs(context, stage, None), stage, GracefulShutdown())
        engine = runner.engine
        steps, first_weights = [], dict[str, str]()
        for step in engine.steps():
            steps.append(step)
            first_weights = first_weights or weight_hashes(engine.trainable_params)
        held_out = engine.evaluate() or {}
        figures = {
            "losses": [step.loss for step in steps],
            "norms": [step.grad_norm for step in steps],
            "eval_loss": held_out["eval_loss"],
            "weights": weight_hashes(engine.trainable_params),
            "first_weights": first_weights,
            "seconds": statistics.median(step.step_seconds for step in steps[len(steps) // 2 :]),
            "deterministic": engine.plan.deterministic,
            "revisions": engine.plan.reasons[len(engine.plans[0].reasons) :],
            "graphs": len(engine._first_backward._graphs),
        }
        events.close()
    free_device()
    return figures


def weight_hashes(params: dict[str, Any]) -> dict[str, str]:
    """A hash of each parameter's bits."""
    import torch

    arrays = {name: param.detach().cpu().contiguous().flatten() for name, param in sorted(params.items())}
    return {name: hashlib.sha256(x.view(dtype=torch.uint8).numpy().tobytes()).hexdigest() for name, x in arrays.items()}


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Equal, or where the first difference is, or why a run changed its plan: out of memory, not the same bits."""
    if first["revisions"] != second["revisions"]:
        return f"plan: {(first['revisions'] or second['revisions'])[0]}"
    before, after = first["first_weights"], second["first_weights"]
    changed = [name for name in before if before[name] != after[name]]
    for step, (one, other) in enumerate(zip(first["losses"], second["losses"], strict=True), 1):
        if one != other:
            names = (
                f"; after step 1 {len(changed)} of {len(before)} weights: {', '.join(changed[:4])}" if changed else ""
            )
            return f"loss of step {step}{names}"
    return next((key for key in ("norms", "eval_loss", "weights") if first[key] != second[key]), "equal")


def repeat(work: Workspace, trial: Trial) -> dict[str, Any]:
    """Train twice and compare."""
    path = work.recipe(trial)
    first, second = train(path, work.folder / "run"), train(path, work.folder / "run")
    return {"result": compare(first, second), "deterministic": second["deterministic"], "graphs": second["graphs"],
            "seconds a step": round(second["seconds"], 4), "last loss": round(second["losses"][-1], 4)}  # fmt: skip


def cost(work: Workspace, trial: Trial) -> dict[str, Any]:
    """Median seconds of a step without deterministic kernels and with, the smaller of two runs each."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for deterministic in (False, True, True, False):
        path = work.recipe(trial, deterministic=deterministic)
        seconds[deterministic].append(train(path, work.folder / "run")["seconds"])
    off, on = (min(seconds[deterministic]) for deterministic in (False, True))
    return {"result": f"{on / off - 1:+.1%}", "false, s": round(off, 4), "true, s": round(on, 4)}


def kill(work: Workspace, trial: Trial, count: int) -> dict[str, Any]:
    """Kill the command at random moments and resume it until it ends; compare with one that was not killed."""
    path, rng = work.recipe(trial, save_steps=8, eval_steps=10), random.Random(f"{SEED} {trial.name}")
    runs = [work.folder / name for name in ("uninterrupted", "killed")]
    try:
        expected = _finish(path, runs[0])
        times = [event["time"] for event in _steps(runs[0])]
        shutil.rmtree(runs[0])  # checkpoints of 5 GB
        moments: list[str] = []
        for _ in range(count):
            process = _start(path, runs[1])
            seconds = _kill_after_a_step(process, runs[1], rng.uniform(0, times[-1] - times[0]) if times else 0.0)
            if process.returncode != -signal.SIGKILL:  # it had ended
                break
            moments.append(f"{seconds:.0f}")
        result = _compare_runs(expected, _finish(path, runs[1]))
    finally:
        for run in runs:
            shutil.rmtree(run, ignore_errors=True)
    return {"result": result, "kills": len(moments), "seconds after each start": " ".join(moments)}


def _start(path: Path, run: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "modelwright", "run", str(path), "--set", f"output_dir={run}"]
    return subprocess.Popen([*command, "--log-format", "json"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _kill_after_a_step(process: subprocess.Popen[bytes], run: Path, delay: float) -> float:
    """Kill a command `delay` seconds after its first new step; returns the seconds since its start."""
    began, before = time.monotonic(), len(_steps(run))
    while process.poll() is None and len(_steps(run)) <= before and time.monotonic() - began < 120:
        time.sleep(0.05)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.monotonic() - began


def _finish(path: Path, run: Path) -> dict[str, Any]:
    """Run the command to its end: values of each step, changes of the plan, and the hashes of the model's files."""
    code = _start(path, run).wait(timeout=300)
    revisions = [event["reason"] for event in journal.read(run / "journal.jsonl") if event["event"] == "plan_revised"]
    values: dict[int, set[tuple[Any, ...]]] = {}
    for event in _steps(run):
        values.setdefault(event["step"], set()).add((event["loss"], event["grad_norm"], event["batch_hash"]))
    files = sorted(run.glob("stages/*/model/*.safetensors"))
    return {
        "exit": code,
        "revisions": revisions,
        "steps": values,
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }


def _compare_runs(expected: dict[str, Any], actual: dict[str, Any]) -> str:
    if not expected["files"] or expected["exit"] or actual["exit"]:
        return f"exit {expected['exit']} and {actual['exit']}, {len(expected['files'])} files"
    if expected["revisions"] or actual["revisions"]:
        return f"plan: {(expected['revisions'] or actual['revisions'])[0]}"
    different = [step for step, values in expected["steps"].items() if actual["steps"].get(step) != values]
    if different:
        return f"step {min(different)}"
    return "equal" if expected["files"] == actual["files"] else "weights"


def _steps(run: Path) -> list[journal.Event]:
    path = run / "journal.jsonl"
    return [event for event in journal.read(path) if event["event"] == "step"] if path.exists() else []


def _words(rng: random.Random, count: int) -> str:
    return " ".join(str(rng.randrange(1, WORDS)) for _ in range(count))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def all_trials(models: Sequence[str], settings: Sequence[str], prefixes: Sequence[str]) -> list[Trial]:
    """Every setting of every model with every prefix, the first prefix first; images depend on neither."""
    trials = [Trial(*each) for each in ((m, s, p) for p in prefixes for m in models for s in settings)]
    return list({trial.name: trial for trial in reversed(trials)}.values())[::-1]


def blocker(setting: str, device: str) -> str | None:
    """Why a setting cannot be tried here."""
    if device == "cpu" and setting in ("CUDA graphs", "fp8", "QLoRA"):
        return "needs a GPU"
    if setting == "QLoRA" and not find_spec("bitsandbytes"):
        return "bitsandbytes is not installed"
    return None


def run_trials(
    trials: Sequence[Trial], first: int, seconds: float, measure: Callable[[Trial], dict[str, Any]]
) -> dict[str, Any]:
    """Measure the trials from number `first` on, until the next one might not fit in the time."""
    began, longest, figures = time.monotonic(), dict[str, float](), dict[str, Any]()
    for number, trial in enumerate(trials[first - 1 :], first):
        started = time.monotonic()
        expected = longest.get(trial.setting, statistics.fmean(longest.values()) if longest else 0.0)
        if started - began + expected > seconds:
            left = f"{len(trials) - number + 1} of {len(trials)} trials did not fit in {seconds:g} s"
            figures["not run"] = {"result": f"{left}: continue with --first {number}"}
            break
        try:
            figure = measure(trial)
        except Exception as error:
            free_device()
            figure = {"result": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"}
        took = time.monotonic() - started
        longest[trial.setting] = max(longest.get(trial.setting, 0.0), took)
        figures[trial.name] = {**figure, "wall, s": round(took)}
        print(f"{number} of {len(trials)}: {trial.name}: {figures[trial.name]}", file=sys.stderr, flush=True)
    return figures


def table(figures: dict[str, Any]) -> Iterator[str]:
    """The figures, a line for each trial; last, how many are equal."""
    columns = list(dict.fromkeys(name for figure in figures.values() for name in figure))
    lines = [[key, *(str(figure.get(name, "")) for name in columns)] for key, figure in figures.items()]
    yield markdown_table(["trial", *columns], lines)
    results = [figure["result"] for figure in figures.values() if "wall, s" in figure]
    if "equal" in results:
        yield f"\n{results.count('equal')} of {len(results)} equal"


def main(
    mode: Annotated[Mode, typer.Argument(help="repeat: train twice; kills: SIGKILL and resume; cost: seconds a step.")],
    models: Annotated[str, typer.Option(help="pythia-410m, llama-3.2-1b, gemma-3-270m or tiny, by commas.")] = "",
    settings: Annotated[str, typer.Option(help=f"By commas; all: {', '.join(SETTINGS)}.")] = "",
    prefixes: Annotated[str, typer.Option(help="Tokens of the shared system prompt, by commas: 20, 300, none.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of a training.")] = 20,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 16,
    count: Annotated[int, typer.Option(help="Kills in all, divided among the trials.")] = 20,
    seconds: Annotated[float, typer.Option(help="Start no trial that would end later than this.")] = 540.0,
    first: Annotated[int, typer.Option(help="Begin with this trial, where an earlier call ran out of time.")] = 1,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu: a tiny model and short rows, to try the command.")
    ] = "cuda",
    save: Save = False,
    as_json: Json = False,
) -> None:
    """Compare losses and weights bit for bit: two runs, or a run that was killed; or measure deterministic kernels.

    Prints a line for each trial, and last a table. Trials: every setting of every model with a shared prefix of 20
    tokens, then of 300, then without (kills: one model unless --models names more, the first prefix, six settings).
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not _has_gpu():
        raise UsageError("there is no GPU here; --device cpu tries the command with a tiny model")
    model_names = models.split(",") if models else (["tiny"] if device == "cpu" else list(MODELS))
    prefix_names = prefixes.split(",") if prefixes else list(PREFIXES)
    setting_names = settings.split(",") if settings else list(KILLED if mode is Mode.KILLS else SETTINGS)
    if mode is Mode.KILLS:
        model_names, prefix_names = model_names if models else model_names[:1], prefix_names[:1]
    for names, known in ((model_names, SHAPES), (setting_names, SETTINGS), (prefix_names, PREFIXES)):
        if unknown := [name for name in names if name not in known]:
            raise UsageError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    blockers = {name: why for name in setting_names if (why := blocker(name, device))}
    trials = all_trials(model_names, [name for name in setting_names if name not in blockers], prefix_names)

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="bits-") as folder:
            work = Workspace(Path(folder), device, {"max_steps": steps, "per_device_train_batch_size": batch})
            kills_each = -(-count // max(1, len(trials)))
            by_mode: dict[Mode, Callable[[Trial], dict[str, Any]]] = {
                Mode.REPEAT: lambda trial: repeat(work, trial),
                Mode.COST: lambda trial: cost(work, trial),
                Mode.KILLS: lambda trial: kill(work, trial, kills_each),
            }
            figures = run_trials(trials, first, seconds, by_mode[mode])
        return {**figures, **{name: {"result": f"left out: {why}"} for name, why in blockers.items()}}

    report(f"gpu-{mode}", measure, table, save, as_json)


if __name__ == "__main__":
    run_command(main)
