"""Export a run's model as a Hugging Face folder, merged, GGUF or .pth, with its model card and SHA-256 sums."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelwright.data.download import sha256_file
from modelwright.errors import ModelError, UsageError
from modelwright.models import trust
from modelwright.models.gguf import unsupported_reason
from modelwright.recipe.load import load
from modelwright.recipe.schema import Recipe
from modelwright.report.model_card import render_model_card
from modelwright.runs.folder import RunFolder, open_run, read_json
from modelwright.stages.gate import promoted_stage

CHECKSUMS_FILE = "SHA256SUMS"
VISION_FORMATS = ("pth",)
FORMATS = ("hf", "merged", "gguf", *VISION_FORMATS)
PTH_FILES = ("best_model.pth", "final_model.pth", "checkpoint_latest.pth")
GGUF_TYPES = ("f16", "q8_0")
DTYPES = {"bf16": ("bfloat16", 5e-2), "fp16": ("float16", 1e-2), "fp32": ("float32", 1e-3)}
"""The dtypes of a model folder: name in torch, and the largest change of a logit as a fraction of the largest."""
DTYPE_FORMATS = ("hf", "merged")


@dataclass(frozen=True)
class ExportRequest:
    """What is to be exported."""

    folder: RunFolder
    """The run."""
    recipe: Recipe
    """The run's recipe."""
    stage: str
    """The stage whose model is exported."""
    format: str
    """One of FORMATS."""
    gguf_type: str
    """For gguf: one of GGUF_TYPES."""
    target: Path
    """The output folder."""
    dtype: str | None = None
    """For hf and merged: one of DTYPES; None leaves the weights as trained."""

    @property
    def warning(self) -> str | None:
        """What to tell who exports a model whose gate is closed and was not accepted."""
        verdict = read_json(self.folder.gate(self.stage)) if self.folder.gate(self.stage).exists() else {}
        if verdict.get("open", True) or verdict.get("accepted"):
            return None
        return f"warning: {verdict['message']}; the model is exported, and its card says so"

    @property
    def model(self) -> Path:
        """The exported model folder."""
        return self.folder.model(self.stage)


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    path: Path
    """The folder."""
    files: dict[str, str]
    """The sha256 of every file in it."""
    logit_comparison: dict[str, float] | None = None
    """For gguf: how the logits of the file compare with those of its source."""


def check_export(
    run: str, export_format: str, gguf_type: str = "f16", output: str | None = None, dtype: str | None = None
) -> ExportRequest:
    """Find the model and refuse an impossible export, before torch is loaded."""
    if export_format not in FORMATS:
        raise UsageError(f"--format {export_format} is unknown; it wants one of {', '.join(FORMATS)}")
    if gguf_type not in GGUF_TYPES:
        raise UsageError(f"--outtype {gguf_type} is unknown; gguf is written as one of {', '.join(GGUF_TYPES)}")
    if dtype is not None and (dtype not in DTYPES or export_format not in DTYPE_FORMATS):
        wants = f"one of {', '.join(DTYPES)}, with --format {' or '.join(DTYPE_FORMATS)}"
        raise UsageError(f"--dtype {dtype} does not fit --format {export_format}; it wants {wants}")
    folder = open_run(run)
    folder.reject_unsafe_files()  # a link would bring other files into the export
    recipe = load(folder.recipe, environ={}).recipe
    stage = promoted_stage(folder, recipe.stages)
    is_vision = recipe.stages[stage].spec.modality == "image"
    if is_vision and export_format not in VISION_FORMATS:
        wants = " or ".join(VISION_FORMATS)
        raise UsageError(f"{run} trained an image classifier, which {export_format} does not hold; it wants {wants}")
    adapter = (folder.model(stage) / "adapter_config.json").exists()
    if export_format == "merged" and not adapter:
        raise UsageError(f"{run} trained no adapter, so there is nothing to merge; --format hf is the whole model")
    if export_format == "gguf" and (reason := unsupported_reason(_base_model_dir(folder.model(stage)))):
        raise UsageError(f"{run} cannot become gguf: {reason}")
    default_name = f"{export_format}-{dtype}" if dtype else export_format
    target = (
        Path(output)
        if output
        else folder.path / "exports" / (f"gguf-{gguf_type}" if export_format == "gguf" else default_name)
    )
    if target.exists() and any(target.iterdir()) and not (target / CHECKSUMS_FILE).exists():
        raise UsageError(f"{target} is there already and is no export of ours; choose another folder with --output")
    return ExportRequest(folder, recipe, stage, export_format, gguf_type, target, dtype)


def export(request: ExportRequest) -> ExportResult:
    """Write the model in the requested format, atomically."""
    from modelwright.models.save import atomic_model_folder

    comparison: dict[str, float] | None = None
    with atomic_model_folder(request.target) as partial:
        comparison, format_note = WRITERS[request.format](request, partial)
        (partial / "README.md").write_text(
            render_model_card(request.folder, request.stage, format_note), encoding="utf-8"
        )
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        files = {str(path.relative_to(partial)): sha256_file(path) for path in paths}
        lines = "".join(f"{digest}  {name}\n" for name, digest in files.items())
        (partial / CHECKSUMS_FILE).write_text(lines, encoding="utf-8")
    return ExportResult(request.target, files, comparison)


def _write_hf(request: ExportRequest, partial: Path) -> tuple[None, str]:
    shutil.copytree(request.model, partial, dirs_exist_ok=True)
    _check_logits(request, partial)
    return None, "A folder that `from_pretrained` reads."


def _write_merged(request: ExportRequest, partial: Path) -> tuple[None, str]:
    from modelwright.models.save import merge_adapter

    merge_adapter(request.model, partial)
    _check_logits(request, partial)
    return None, "The adapter's matrices are part of the weights: it needs no peft to be read."


def _check_logits(request: ExportRequest, partial: Path) -> None:
    """Cast an exported folder to its dtype, load it back, and refuse it unless its logits are the run's model's."""
    from modelwright.models.gguf import MAX_DIFF, max_logit_diff
    from modelwright.models.save import cast_weights

    limit = MAX_DIFF / 10
    if request.dtype:
        name, limit = DTYPES[request.dtype]
        cast_weights(partial, name)
    if not (gap := max_logit_diff(request.model, partial)) <= limit:
        finding = f"the exported model's logits are {gap:.2g} of the largest off those of the trained one"
        raise ModelError(f"export: {finding}, above {limit:g}; not kept")


def _write_gguf(request: ExportRequest, partial: Path) -> tuple[dict[str, float], str]:
    from modelwright.models import gguf

    path = partial / f"{request.recipe.name}-{request.gguf_type}.gguf"
    gguf.write_gguf(request.model, path, request.gguf_type, request.recipe.name)  # type: ignore[arg-type]
    check = gguf.compare_logits(request.model, path, request.gguf_type)  # type: ignore[arg-type]
    if not check.max_diff_same_dtype <= gguf.MAX_DIFF:  # NaN too
        finding = f"the file's logits are up to {check.max_diff_same_dtype:.2g} off its source's in {request.gguf_type}"
        raise ModelError(f"export: {finding}, above {gguf.MAX_DIFF:g}; not kept")
    if not check.relative_diff <= gguf.MAX_QUANTIZATION_LOSS[request.gguf_type]:
        finding = f"in {request.gguf_type} this model's logits move by {check.relative_diff:.1%} of the largest"
        raise ModelError(f"export: {finding}, above {gguf.MAX_QUANTIZATION_LOSS[request.gguf_type]:.1%}; not kept")
    comparison = asdict(check)
    return (
        comparison,
        f"One GGUF file ({request.gguf_type}). {describe_logit_comparison(comparison, request.gguf_type)}",
    )


def describe_logit_comparison(comparison: dict[str, float], gguf_type: str) -> str:
    """How a GGUF file compares with its source, as text."""
    same_dtype, trained, relative, agreement, positions = (
        comparison[name] for name in ("max_diff_same_dtype", "max_diff", "relative_diff", "top1_agreement", "positions")
    )
    return (
        f"Read back, its logits are at most {same_dtype:.1e} off the source's in {gguf_type} and {trained:.1e} "
        f"({relative:.1e} of the largest) off the source's as trained; the most likely token is the same at "
        f"{agreement:.1%} of {positions} positions."
    )


def _write_pth(request: ExportRequest, partial: Path) -> tuple[None, str]:
    write_pth_files(request.folder, request.recipe, request.stage, partial)
    layout = "torchvision's names (first convolution 3 × 3, stride 1, no max-pool)"
    is_vision = request.recipe.stages[request.stage].spec.modality == "image"
    names = layout if is_vision else "the names of `from_pretrained`, adapters merged"
    return None, (
        f"Weights as `.pth` with {names}: best_model, final_model and checkpoint_latest. "
        "Read them with `torch.load(path, weights_only=True)`."
    )


def write_pth_files(folder: RunFolder, recipe: Recipe, stage: str, target: Path) -> None:
    """Write PTH_FILES: the best weights, those of the last step, and these with optimizer state and history.

    They are whole state dicts: tied weights under each of their names (stored once), adapters merged."""
    from modelwright.engine.checkpoint import CheckpointManager, read_state, stored_tensors
    from modelwright.engine.trainer import MODEL_FILE, OPTIMIZER_FILE
    from modelwright.models.pretrained import load_model
    from modelwright.models.save import save_pth
    from modelwright.models.vision import load_vision

    def load_best() -> tuple[Any, dict[str, Any]]:
        is_vision = recipe.stages[stage].spec.modality == "image"
        return load_vision(folder.model(stage)) if is_vision else (load_model(folder.model(stage)), {})

    def full_state_dict(model: Any) -> dict[str, Any]:
        return (model.merge_and_unload() if hasattr(model, "merge_and_unload") else model).state_dict()  # type: ignore[no-any-return]

    best_model, final_model, checkpoint = (target / name for name in PTH_FILES)
    (model, config), optimizer, state = load_best(), {}, {}
    save_pth(best_model, full_state_dict(model))
    newest = CheckpointManager(folder.checkpoints(stage), 2, lambda line: None).newest_valid()
    if newest is not None:
        model = load_best()[0]
        names, stored = set(model.state_dict()), stored_tensors(newest, MODEL_FILE)
        last = {name: stored[key]() for key in stored if (name := _model_key(key, names)) is not None}
        model.load_state_dict(last, strict=False)  # frozen weights are in no checkpoint
        optimizer = {name: read() for name, read in stored_tensors(newest, OPTIMIZER_FILE).items()}
        state = read_state(newest)
    final, cursor = full_state_dict(model), state.get("cursor", {})
    save_pth(final_model, final)
    save_pth(checkpoint, {
        "epoch": cursor.get("epoch", 0), "step": cursor.get("step", 0), "model_state_dict": final,
        "optimizer_state": optimizer, "history": state.get("evaluations", []),
        **{name: list(config[name]) for name in ("class_names", "mean", "std") if name in config},
    })  # fmt: skip


WRITERS: dict[str, Callable[[ExportRequest, Path], tuple[dict[str, float] | None, str]]] = {
    "hf": _write_hf, "merged": _write_merged, "gguf": _write_gguf, "pth": _write_pth,
}  # fmt: skip


def _model_key(key: str, names: set[str]) -> str | None:
    """The model's name of a weight whose checkpoint key has the task's prefix."""
    parts = key.split(".")
    return next((name for start in range(len(parts)) if (name := ".".join(parts[start:])) in names), None)


def _base_model_dir(model: Path) -> Path:
    """The folder of a model's config: of an adapter, that of its base model."""
    return trust.adapter_base(model) if (model / trust.ADAPTER_CONFIG).exists() else model


def as_json(result: ExportResult) -> dict[str, Any]:
    """The result as JSON."""
    return {"path": str(result.path), "files": result.files, "logit_comparison": result.logit_comparison}
