"""What each special path for speed brings: the work it was made for with the path on and off, in one process.

A path stays in the package if it brings at least 3 % there or decides whether a job fits. It is switched off by a
setting of its stage where there is one, else by a patch in this file. Each work is trained with all of its paths on,
with each of them off, and the same again in reverse order.
"""

from __future__ import annotations

import atexit
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

from benchmarks import common, finetuning, speed, workloads
from benchmarks.common import Progress, free_device, require_finite
from benchmarks.peer_trainers import NOT_PROFILED, StepTimes, device_name, make_engine, torch_device, train_engine
from benchmarks.tables import markdown_table
from benchmarks.workloads import COMPILED, DPO, FULL, HALF_MEAN, SELECTIVE, WORKLOADS, SftScenario, Variant, Workload
from modelwright.errors import UsageError

Figures = dict[str, Any]
Settings = dict[str, Any]
WORTH = 1.03
"""The speed-up from which a path stays."""
IMAGES = {"resnet": (64, 512), "tiny": (4, 4)}
"""Width of the ResNet-18 and images per step."""
PACKED = {**workloads.PACKED, "share_prefix": False}


@dataclass(frozen=True)
class SpecialPath:
    """A special path and how it is switched off."""

    name: str
    """For --only."""
    file: str
    """Where it is, under src/modelwright."""
    work: str
    """The work it was made for."""
    settings: Settings = field(default_factory=dict)
    """Settings that switch it off."""
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What switches it off where no setting does."""
    repeats: int = 2
    """Runs without it."""


@dataclass(frozen=True)
class Work:
    """A training that special paths were made for."""

    label: str
    """The model and batch, in words."""
    unit: str
    """What a step has many of."""
    train: Callable[[Settings, int, bool], tuple[float, StepTimes]]
    """Trains with settings for some steps, tiny or not; returns units per step, and the times."""
    steps: int
    """Steps of each run."""
    settings: Settings = field(default_factory=dict)
    """Settings of every run."""
    repeats: int = 2
    """Runs with everything on."""
    device: str = "cuda"
    """Where it is measured."""


def train_tokens(workload: Workload, settings: Settings, steps: int, tiny: bool) -> tuple[float, StepTimes]:
    """Pretraining or LoRA on token rows."""
    workload = WORKLOADS["tiny-lora" if workload.lora else "tiny"] if tiny else workload
    rows = workloads.token_rows(workload, steps)
    return workload.batch * workload.length, speed.train_modelwright(workload, Variant("", settings), rows)


def train_sft(batch: int, settings: Settings, steps: int, tiny: bool) -> tuple[float, StepTimes]:
    """SFT under the survival recipe's system prompt."""
    on_gpu = torch_device().type == "cuda"
    scenario = SftScenario("tiny" if tiny else "smollm3" if on_gpu else "twin", batch * steps, batch, 1, steps)
    setup = finetuning.BenchSetup(scenario, *rows_and_tokenizer(scenario), steps)
    return finetuning.sft_modelwright(setup, Variant("", settings), NOT_PROFILED)


@cache
def rows_and_tokenizer(scenario: SftScenario) -> tuple[Any, Path]:
    """The conversations of a scenario, and the folder of a tokenizer for them, both made once."""
    rows, folder = workloads.scenario_conversations(scenario, ROWS), _folder()
    workloads.save_scenario_tokenizer(scenario, rows, folder)
    return rows, folder


def _folder() -> Path:
    """A folder until the process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def train_last_layers(settings: Settings, steps: int, tiny: bool) -> tuple[float, StepTimes]:
    """The survival fine-tune of two layers and the head; a step carries its share of what comes before the first."""
    scenario = workloads.SURVIVAL["survival-tiny" if tiny else "survival-3b"]
    rows, folder = rows_and_tokenizer(scenario)
    times, _ = finetuning.survival_modelwright(scenario, rows, folder, steps, **settings)
    total = -(-len(rows.train) * scenario.epochs // scenario.batch)
    share = times.before / total
    return scenario.batch, replace(times, seconds=[seconds + share for seconds in times.seconds])


def train_dpo(settings: Settings, steps: int, tiny: bool) -> tuple[float, StepTimes]:
    """DPO on pairs of exact lengths."""
    workload = DPO["dpo-tiny" if tiny else "dpo"]
    _, times = finetuning.dpo_modelwright(workload, Variant("", settings), dpo_model(workload), steps, NOT_PROFILED)
    return workload.pairs, times


@cache
def dpo_model(workload: workloads.DpoWorkload) -> Path:
    """The folder of a model, made once."""
    folder = _folder()
    workloads.save_dpo_model(folder, workload)
    return folder


def train_images(settings: Settings, steps: int, tiny: bool) -> tuple[float, StepTimes]:
    """ResNet-18 on random images of CIFAR-10's size, with the shipped recipe's settings."""
    from modelwright.data.images import ImageDataset, ImageSplits
    from modelwright.models.vision import resnet18
    from modelwright.recipe.load import load
    from modelwright.tasks.classify import ClassifyTask

    began, (width, batch) = time.perf_counter(), IMAGES["tiny" if tiny else "resnet"]
    rng, classes = np.random.default_rng(workloads.SEED), tuple(map(str, range(10)))
    rows = batch * min(steps, 20)
    images = ImageDataset(
        rng.integers(0, 256, (rows, 32, 32, 3), np.uint8), rng.integers(0, 10, rows), classes, "random"
    )
    recipe = load("resnet18-cifar10", environ={}).recipe
    assert recipe.classify is not None
    options = {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": 0.01, **settings}
    settings_of_stage = recipe.classify.model_copy(update=options)
    torch_seed()
    task = ClassifyTask(resnet18(width=width), ImageSplits(images, images), settings_of_stage, workloads.SEED)
    return batch, train_engine(make_engine(task, settings_of_stage), steps, began)


def torch_seed() -> None:
    """The same initial weights in every run."""
    import torch

    torch.manual_seed(workloads.SEED)


ROWS: Path | None = None
"""A file of questions and answers for the SFT works; without one the embedded field guide."""
SIX_B = replace(WORKLOADS["6b"], accumulation=1)
SFT_LABEL = "SFT of every weight, SmolLM3-3B shape, 32 rows a step under a system prompt"
WORKS = {
    "0.5b": Work("pretrain 0.5 B, 8 × 512", "tokens", partial(train_tokens, WORKLOADS["0.5b"]), 40, COMPILED),
    "6b": Work("pretrain 6.08 B, 8 × 2048", "tokens", partial(train_tokens, SIX_B), 6, HALF_MEAN, 1),
    "6b-selective": Work(
        "pretrain 6.08 B, 8 × 2048, selective checkpointing", "tokens", partial(train_tokens, SIX_B), 5,
        {**HALF_MEAN, **SELECTIVE}, 1,
    ),
    "6b-eager": Work(
        "pretrain 6.08 B, 8 × 2048, selective checkpointing, not compiled", "tokens", partial(train_tokens, SIX_B), 5,
        {**HALF_MEAN, "torch_compile": False, **SELECTIVE}, 1,
    ),
    "lora": Work("LoRA, 8.0 B shape, 4 × 4096", "tokens", partial(train_tokens, WORKLOADS["lora"]), 6, COMPILED),
    "sft": Work(SFT_LABEL, "rows", partial(train_sft, 32), 40, COMPILED),
    "sft-packed": Work(
        "SFT, SmolLM3-3B shape, packed to 4096, nothing shared", "rows", partial(train_sft, 32), 10,
        {**COMPILED, **PACKED},
    ),
    "sft-cpu": Work("SFT of SmolLM2-135M under a system prompt, 8 rows a step, CPU", "rows", partial(train_sft, 8), 3,
                    {"precision": "fp32"}, device="cpu"),
    "survival": Work("last two layers and head, SmolLM3-3B shape, 2,845 rows × 4 epochs, caching counted", "rows",
                     train_last_layers, 24, {"precision": "bf16"}),
    "dpo": Work(f"DPO, {DPO['dpo']}", "pairs", train_dpo, 20, {"torch_compile": True}),
    "resnet": Work("ResNet-18, 512 images of 32 × 32 a step", "images", train_images, 80),
}  # fmt: skip


def _plain_lora_mlp() -> AbstractContextManager[Any]:
    from modelwright.models import trainable

    return patch.object(trainable, "install_fused_lora_mlp", lambda model: model)


def _torch_batch_norm() -> AbstractContextManager[Any]:
    from modelwright.models import vision

    return patch.object(vision, "_is_fast", lambda norm, x: False)


def _channels_first() -> AbstractContextManager[Any]:
    """Without channels_last the fused batch norm does not apply either."""
    import torch

    from modelwright.tasks.classify import ClassifyLoss

    init, normalise = ClassifyLoss.__init__, ClassifyLoss.normalise

    def contiguous_init(self: Any, model: Any, *args: Any) -> None:
        init(self, model, *args)
        self.model = self.model.to(memory_format=torch.contiguous_format)

    stack = ExitStack()
    stack.enter_context(patch.object(ClassifyLoss, "__init__", contiguous_init))
    stack.enter_context(patch.object(ClassifyLoss, "normalise", lambda self, x: normalise(self, x).contiguous()))
    return stack


def _masked_prefix() -> AbstractContextManager[Any]:
    from modelwright.tasks import sft

    return patch.object(sft, "_supports_varlen_prefix", lambda model, settings: False)


def _varlen_pairs() -> AbstractContextManager[Any]:
    """DPO by the varlen layout of SFT instead of copies of the prompt."""
    from modelwright.models import prefix_sharing
    from modelwright.tasks import dpo

    supports = prefix_sharing.supports_layout
    wanted = prefix_sharing.shared_prefix_layout
    return patch.object(dpo, "supports_layout", lambda model, layout: layout is wanted and supports(model, layout))


def _masked_pairs() -> AbstractContextManager[Any]:
    from modelwright.tasks import dpo

    return patch.object(dpo, "supports_layout", lambda model, layout: False)


def _plain_loss() -> AbstractContextManager[Any]:
    """Logits of all tokens at once, and gradients by autograd."""
    from torch.nn.functional import linear

    from modelwright.tasks import losses

    def plain(hidden: Any, head: Any, targets: Any) -> Any:
        return losses.summed_cross_entropy(linear(hidden, head), targets)

    return patch.object(losses, "fused_linear_cross_entropy", plain)


def _plain_logps() -> AbstractContextManager[Any]:
    """Log-probs by torch's operations."""
    from modelwright.tasks import losses

    return patch.object(losses._SelectiveLogSoftmax, "apply", losses.selective_log_softmax)


def _transformers_attention() -> AbstractContextManager[Any]:
    """SDPA with a mask made by transformers."""
    from modelwright.models import pretrained

    def prepare(model: Any, device: Any, _attn_implementation: str, packed: bool = True) -> None:
        original(model, device, "sdpa", packed)

    original = pretrained.prepare_model
    return patch.object(pretrained, "prepare_model", prepare)


def _torch_selective_contexts() -> AbstractContextManager[Any]:
    """torch's own eager contexts instead of SavedMatmuls."""
    from modelwright.models import activation_checkpoint

    contexts = activation_checkpoint._compiled_contexts
    return patch.object(activation_checkpoint.SavedMatmuls, "contexts", lambda _: contexts())


def _compiled_adamw() -> AbstractContextManager[Any]:
    """One compiled kernel per tensor instead of the Triton kernel."""
    import torch

    from modelwright.engine import adamw_triton, bf16_adamw

    compiled = torch.compile(bf16_adamw._adamw_update, dynamic=False)

    class PerTensor:
        def __init__(self, tensors: Any) -> None:
            self._tensors = [tuple(tensor.flatten() for tensor in params) for params in tensors]

        def __call__(self, *scalars: Any) -> None:
            for params in self._tensors:
                compiled(params, *scalars)

    return patch.object(adamw_triton, "MultiTensorAdamW", PerTensor)


PATHS = (
    SpecialPath("cuda-graphs", "engine/cuda_graphs.py", "0.5b", {"cuda_graphs": "never"}),
    SpecialPath("bf16-masters", "engine/bf16_adamw.py", "0.5b", {"param_dtype": "fp32"}),
    SpecialPath("prefix-sharing", "models/prefix_sharing.py", "sft", {"share_prefix": False}),
    SpecialPath("prefix-varlen", "models/prefix_sharing.py", "sft", patch=_masked_prefix),
    SpecialPath("adamw-triton", "engine/adamw_triton.py", "sft", patch=_compiled_adamw),
    SpecialPath("varlen-attention", "models/attention.py", "sft-packed", patch=_transformers_attention),
    SpecialPath("share-prompt", "tasks/dpo.py", "dpo", {"share_prompt": False}),
    SpecialPath("unshared-layout", "models/attention.py", "dpo", patch=_varlen_pairs),
    SpecialPath("prompt-without-mask", "models/attention.py", "dpo", patch=_masked_pairs),
    SpecialPath("loss-kernels", "tasks/losses.py", "dpo", patch=_plain_logps),
    SpecialPath("frozen-cache", "tasks/frozen_cache.py", "survival", {"cache_frozen_layers": "off"}),
    SpecialPath("batch-norm-kernels", "models/kernels.py", "resnet", patch=_torch_batch_norm),
    SpecialPath("channels-last", "tasks/classify.py", "resnet", patch=_channels_first),
    SpecialPath("batch-norm-compiled", "models/kernels.py", "resnet", {"torch_compile": True}),
    SpecialPath("fused-lora-mlp", "models/trainable.py", "lora", patch=_plain_lora_mlp),
    SpecialPath("chunked-loss", "tasks/losses.py", "lora", patch=_plain_loss, repeats=1),
    SpecialPath("chunked-loss-6b", "tasks/losses.py", "6b", patch=_plain_loss, repeats=1),
    SpecialPath("selective-checkpointing", "models/activation_checkpoint.py", "6b-selective", FULL, repeats=1),
    SpecialPath(
        "eager-saved-matmuls", "models/activation_checkpoint.py", "6b-eager", patch=_torch_selective_contexts, repeats=1
    ),
    SpecialPath("cpu-varlen-prefix", "models/attention.py", "sft-cpu", patch=_masked_prefix),
)
NAMES = tuple(path.name for path in PATHS)
ON_CPU_TOO = {
    "prefix-sharing", "prefix-varlen", "share-prompt", "frozen-cache", "channels-last", "fused-lora-mlp",
    "chunked-loss", "selective-checkpointing", "eager-saved-matmuls", "cpu-varlen-prefix",
}  # fmt: skip
"""Paths that can be switched off in a tiny run on a CPU."""


def measure(only: Sequence[str] = (), tiny: bool = False) -> Figures:
    """Every path, or those named, each with the work it was made for."""
    if unknown := [name for name in only if name not in NAMES]:
        raise UsageError(f"--only is {unknown[0]!r}; it wants one of {', '.join(NAMES)}")
    paths = [PATHS[NAMES.index(name)] for name in only or NAMES]
    if tiny:
        paths = [path for path in paths if path.name in ON_CPU_TOO]
    figures: Figures = {"device": device_name(), "tiny": tiny, "paths": {}}
    device = torch_device().type
    for name in dict.fromkeys(path.work for path in paths):
        if tiny or WORKS[name].device == device:
            figures["paths"] |= measure_work(name, [path for path in paths if path.work == name], tiny)
    return figures


def measure_work(name: str, paths: Sequence[SpecialPath], tiny: bool) -> dict[str, Figures]:
    """A work with all of its paths, with each of them off, and the same in reverse order."""
    work, progress = WORKS[name], Progress(name)
    again = [path for path in (*paths[::-1], None) if (path or work).repeats > 1]
    runs: dict[str, list[Figures]] = {}
    for path in (None, *paths, *again):
        label = f"{path.name} off" if path else "all on"
        run = train(work, path, tiny)
        progress.log(f"{label} { ({**run, 'losses': run['losses'][-1:]} if 'losses' in run else run) }")
        runs.setdefault(label, []).append(run)
    figures = {path.name: compare(path, work, runs["all on"], runs[f"{path.name} off"]) for path in paths}
    progress.log(json.dumps(figures))  # a run that is stopped keeps what was measured
    return figures


def train(work: Work, path: SpecialPath | None, tiny: bool) -> Figures:
    """One run; one that fails says why."""
    free_device()
    settings = {**work.settings, **(path.settings if path else {})}
    if tiny:
        settings |= {"precision": "fp32", "torch_compile": False, "param_dtype": "fp32"}
    try:
        with path.patch() if path else nullcontext():
            units, times = work.train(settings, 2 if tiny else work.steps, tiny)
            require_finite(times.losses)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip()[:200]}"}
    return {
        "step_seconds": times.step_seconds, "per_second": units / times.step_seconds,
        "memory_gb": round(times.memory / 1e9, 2), "losses": times.losses,
    }  # fmt: skip


def compare(path: SpecialPath, work: Work, on: list[Figures], off: list[Figures]) -> Figures:
    """The figures of a path: with it, without it, and how many times faster it is."""
    figures: Figures = {"file": path.file, "work": work.label, "unit": work.unit}
    figures |= {"on": _summary(on), "off": _summary(off)}
    if any("failed" in run for run in (*on, *off)):
        return figures
    seconds = [mean(run["step_seconds"] for run in runs) for runs in (on, off)]
    gaps = [abs(a - b) for a, b in zip(on[0]["losses"], off[0]["losses"], strict=True)]
    return figures | {"ratio": round(seconds[1] / seconds[0], 4), "largest_loss_difference": max(gaps)}


def _summary(runs: list[Figures]) -> Figures:
    if failed := [run for run in runs if "failed" in run]:
        return failed[0]
    return {
        "step_seconds": [round(run["step_seconds"], 5) for run in runs],
        "per_second": round(mean(run["per_second"] for run in runs), 2),
        "memory_gb": max(run["memory_gb"] for run in runs),
    }


def lines(figures: Figures) -> Iterator[str]:
    """The table."""
    yield f"{figures['device']}{', tiny' * figures['tiny']}"
    for name, path in figures["paths"].items():
        on, off = path["on"], path["off"]
        if "ratio" not in path:
            yield f"{name}: on {_rate(on, path)}; off {_rate(off, path)}"
            continue
        yield (
            f"{name}: {path['ratio'] - 1:+.1%} ({_rate(off, path)} → {_rate(on, path)}), "
            f"largest loss difference {path['largest_loss_difference']:.1e}, {path['work']}"
        )


def table(result: Figures) -> str:
    """A result as a Markdown table, with what was decided of each path."""
    header = ("path", "made for", "off → on", "gain", "memory, off → on", "decision")
    rows = []
    for name, path in result["figures"]["paths"].items():
        on, off = path["on"], path["off"]
        memory = "–" if on["memory_gb"] is None else f"{off['memory_gb']:.1f} → {on['memory_gb']:.1f} GB"
        rates = f"{_number(off['per_second'])} → {_number(on['per_second'])} {path['unit']}/s"
        gain = f"{path['ratio'] - 1:+.1%}" if path["ratio"] < 2 else f"× {path['ratio']:.2f}"
        rows.append((f"`{name}`, `{path['file']}`", path["work"], rates, gain, memory, path["decision"]))
    return markdown_table(header, rows)


def _rate(side: Figures, path: Figures) -> str:
    if "failed" in side:
        return str(side["failed"])
    return f"{_number(side['per_second'])} {path['unit']}/s, {side['memory_gb']:.1f} GB"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def main(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="This path; repeatable.")] = None,
    rows: Annotated[Path | None, typer.Option("--rows", help="Questions and answers for the SFT works.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny models on any device, to see that it works.")] = False,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """What each special path for speed brings on the work it was made for."""
    global ROWS
    ROWS = rows
    common.report("ablation", lambda: measure(only or (), tiny), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
