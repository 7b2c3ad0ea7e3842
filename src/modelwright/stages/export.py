"""Hand a model on: as a folder, merged, as GGUF or as .pth, each with its card and the sha256 of every file."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import ModelError, UsageError
from modelwright.models.gguf_names import refusal
from modelwright.recipe.load import load
from modelwright.recipe.schema import Recipe
from modelwright.report.model_card import model_card
from modelwright.runs.folder import RunFolder, open_run, read_json

SUMS = "SHA256SUMS"
TEXT_FORMS, VISION_FORMS = ("hf", "merged", "gguf"), ("pth",)
FORMS = (*TEXT_FORMS, *VISION_FORMS)
KINDS = ("f16", "q8_0")


@dataclass(frozen=True)
class Order:
    """What is to be exported."""

    folder: RunFolder
    """Of which run."""
    recipe: Recipe
    """As the run keeps it."""
    stage: str
    """Which stage's model."""
    form: str
    """In which form."""
    kind: str
    """For gguf: how its numbers are kept."""
    target: Path
    """Where to."""

    @property
    def model(self) -> Path:
        """The model folder that is handed on."""
        return self.folder.model(self.stage)


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    """The folder."""
    files: dict[str, str]
    """The sha256 of every file in it."""
    held: dict[str, float] | None = None
    """How the file compares with its source, where that was looked at."""


def order(run: str, form: str, kind: str = "f16", to: str | None = None) -> Order:
    """Find everything and refuse what cannot be, before anything heavy is loaded."""
    if form not in FORMS:
        raise UsageError(f"--format {form} is unknown; it wants one of {', '.join(FORMS)}")
    if kind not in KINDS:
        raise UsageError(f"--kind {kind} is unknown; gguf is written as one of {', '.join(KINDS)}")
    folder = open_run(run)
    folder.refuse_links()  # a link would bring files of others into what is handed on
    recipe = load(folder.recipe, environ={}).recipe
    stage = _stage(folder, recipe, run)
    known = VISION_FORMS if stage == "classify" else TEXT_FORMS
    if form not in known:
        what = "an image classifier" if stage == "classify" else "a language model"
        raise UsageError(f"{run} trained {what}, which {form} does not hold; it wants {' or '.join(known)}")
    adapter = (folder.model(stage) / "adapter_config.json").exists()
    if form == "merged" and not adapter:
        raise UsageError(f"{run} trained no adapter, so there is nothing to merge; --format hf is the whole model")
    if form == "gguf" and (reason := refusal(_base_of(folder.model(stage)))):
        raise UsageError(f"{run} cannot become gguf: {reason}")
    target = Path(to) if to else folder.path / "exports" / (f"gguf-{kind}" if form == "gguf" else form)
    if target.exists() and any(target.iterdir()) and not (target / SUMS).exists():
        raise UsageError(f"{target} is there already and is no export of ours; choose another folder with --to")
    return Order(folder, recipe, stage, form, kind, target)


def export(asked: Order) -> Exported:
    """Write the model in its form, whole or not at all."""
    from modelwright.models.export import model_folder

    held: dict[str, float] | None = None
    with model_folder(asked.target) as partial:
        held, told = WRITERS[asked.form](asked, partial)
        (partial / "README.md").write_text(model_card(asked.folder, asked.stage, told), encoding="utf-8")
        files = {str(path.relative_to(partial)): _sha256(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        lines = "".join(f"{digest}  {name}\n" for name, digest in files.items())
        (partial / SUMS).write_text(lines, encoding="utf-8")
    return Exported(asked.target, files, held)


def _hf(asked: Order, partial: Path) -> tuple[None, str]:
    shutil.copytree(asked.model, partial, dirs_exist_ok=True)
    return None, "A folder that `from_pretrained` reads."


def _merged(asked: Order, partial: Path) -> tuple[None, str]:
    from modelwright.models.export import merge_adapter

    merge_adapter(asked.model, partial)
    return None, "The adapter's matrices are part of the weights: it needs no peft to be read."


def _gguf(asked: Order, partial: Path) -> tuple[dict[str, float], str]:
    from modelwright.models import gguf

    path = partial / f"{asked.recipe.name}-{asked.kind}.gguf"
    gguf.write_gguf(asked.model, path, asked.kind, asked.recipe.name)  # type: ignore[arg-type]
    held = gguf.hold_against(asked.model, path, asked.kind)  # type: ignore[arg-type]
    if held.in_kind > gguf.MOST_OFF:
        found = f"the file's logits are up to {held.in_kind:.2g} off its source's in {asked.kind}"
        raise ModelError(f"export: {found}, above {gguf.MOST_OFF:g}; not kept")
    if held.share > gguf.MOST_LOST[asked.kind]:
        found = f"in {asked.kind} this model's logits move by {held.share:.1%} of the largest"
        raise ModelError(f"export: {found}, above {gguf.MOST_LOST[asked.kind]:.1%}; not kept")
    return asdict(held), f"One GGUF file ({asked.kind}). {said_of(asdict(held), asked.kind)}"


def said_of(held: dict[str, float], kind: str) -> str:
    """How a GGUF file compares with its source, in words."""
    return (
        f"Read back, its logits are at most {held['in_kind']:.1e} off the source's in {kind} and "
        f"{held['absolute']:.1e} ({held['share']:.1e} of the largest) off the source's as trained; the likeliest token "
        f"is the same at "
        f"{held['agree']:.1%} of {held['places']} places."
    )


def _pth(asked: Order, partial: Path) -> tuple[None, str]:
    from modelwright.engine.checkpoint import Checkpoints, read_state
    from modelwright.engine.state import MODEL, OPTIMIZER
    from modelwright.models.pth import weights_in, write_pth
    from modelwright.models.vision import WEIGHTS, load_vision

    best = weights_in(asked.model / WEIGHTS)
    model, config = load_vision(asked.model)
    write_pth(partial / "best_model.pth", best)
    newest = Checkpoints(asked.folder.checkpoints(asked.stage), 2, lambda line: None).newest_good()
    final, optimizer, state = best, {}, {}
    if newest is not None:
        names = set(model.state_dict())
        stored = weights_in(newest / MODEL)
        final = {name: stored[key] for key in stored if (name := _bare_name(key, names)) is not None}
        optimizer, state = weights_in(newest / OPTIMIZER), read_state(newest)
    write_pth(partial / "final_model.pth", final)
    cursor = state.get("cursor", {})
    write_pth(partial / "checkpoint_latest.pth", {
        "epoch": cursor.get("epoch", 0), "step": cursor.get("step", 0), "model_state_dict": final,
        "optimizer_state": optimizer, "history": state.get("evaluations", []), "class_names": config["class_names"],
        "mean": list(config["mean"]), "std": list(config["std"]),
    })  # fmt: skip
    return None, (
        "Weights as `.pth` with torchvision's names (first convolution 3 × 3, stride 1, no max-pool): best_model, "
        "final_model and checkpoint_latest. Read them with `torch.load(path, weights_only=True)`."
    )


WRITERS: dict[str, Callable[[Order, Path], tuple[dict[str, float] | None, str]]] = {
    "hf": _hf, "merged": _merged, "gguf": _gguf, "pth": _pth,
}  # fmt: skip


def _bare_name(key: str, names: set[str]) -> str | None:
    """The model's own name of a weight that a task keeps under a longer one."""
    return next((key[start:] for start in _starts(key) if key[start:] in names), None)


def _starts(key: str) -> list[int]:
    return [0, *(place + 1 for place, sign in enumerate(key) if sign == ".")]


def _base_of(model: Path) -> Path:
    """Where a model's own small files are: an adapter names its base."""
    config = model / "adapter_config.json"
    return Path(read_json(config)["base_model_name_or_path"]) if config.exists() else model


def _stage(folder: RunFolder, recipe: Recipe, run: str) -> str:
    """The promoted stage; where no gate has opened yet, the last one trained."""
    best = folder.best_model.resolve().parent.name if folder.best_model.exists() else None
    for stage in (best, *reversed(list(recipe.stages))):
        if stage and folder.result(stage).exists():
            return stage
    raise UsageError(f"{run} has no finished stage yet; finish it with: modelwright run")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def as_json(done: Exported) -> dict[str, Any]:
    """What was written, for machines."""
    return {"path": str(done.path), "files": done.files, "held_against_source": done.held}
