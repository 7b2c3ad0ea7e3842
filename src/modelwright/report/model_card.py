"""The card that travels with a model: what it is, what it learnt from, what was measured, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from modelwright import __version__
from modelwright.report.lines import counted, plain
from modelwright.report.story import Story, cut
from modelwright.report.view import View, shown, view_of
from modelwright.runs.folder import RunFolder

MOST_SAMPLES = 3
LONGEST_SAMPLE = 600
EMBEDDED_LICENCE = {"smollm2-135m-instruct": "apache-2.0"}
"""Licences of models that come in a package."""
LICENCE = re.compile(r"^license:\s*([\w.-]{1,40})\s*$", re.MULTILINE)


def model_card(folder: RunFolder, stage: str, form: str = "") -> str:
    """The card of a judged stage's model, from what lies in the run folder; `form` says what it was exported as."""
    story = Story()
    story.add({"time": 0.0, "event": "stage", "stage": stage})  # the files are asked for this stage alone
    view = view_of(folder, story)
    gate, data = view.gates.get(stage, {}), view.data.get(stage, {})
    parts = [
        _front(view, stage),
        f"# {view.name}",
        plain(view.description),
        form,
        _origin(view, stage),
        "## Measured",
        _table(gate.get("metrics", {})),
        _verdicts(view, stage, gate),
        "## Data",
        _data(data),
        "## Settings that are not the defaults",
        _settings(view),
        _arithmetic(view.plan.get(stage, {})),
        _samples(folder),
        "## Limits",
        "No claim is made beyond these measurements: it was measured on the rows held out from its own data, and on "
        "nothing else. It may be wrong, biased or unsafe in everything that was not measured, as its base may be.",
        "## Licence",
        _licence(view),
        f"Made with Modelwright {__version__}; `recipe.yaml` of the run makes it again.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(view: View, stage: str) -> str:
    recipe = view.loaded.recipe if view.loaded else None
    library = "modelwright"
    if stage != "classify":
        adapter = (view.folder.model(stage) / "adapter_config.json").exists()
        library = "peft" if adapter else "transformers"
    lines = ["---", f"library_name: {library}", f"tags: [modelwright, {stage}]"]
    name = recipe.model.model_name_or_path if recipe else None
    if name and name.count("/") == 1 and recipe and recipe.model.revision:
        lines.append(f"base_model: {json.dumps(name)}")
    if licence := _known_licence(view):
        lines.append(f"license: {licence}")
    return "\n".join([*lines, "---"])


def _origin(view: View, stage: str) -> str:
    recipe = view.loaded.recipe if view.loaded else None
    if recipe is None:
        return ""
    revision = f" at `{recipe.model.revision}`" if recipe.model.revision else ""
    parent = recipe.parent_of(stage)
    start = f"It started from this run's {parent} model. " if parent else ""
    wishes = view.results.get(stage, {}).get("wishes", {})
    known = wishes.get("model.contents")
    contents = f" Fingerprint of what it started from: {_quoted(known)}." if known else ""
    return f"Base model: {_quoted(recipe.model.name)}{revision}. {start}Stage: {stage}.{contents}"


def _table(metrics: dict[str, Any]) -> str:
    rows = [f"| {plain(name)} | {value:.4g} |" for name, value in metrics.items() if isinstance(value, int | float)]
    return "\n".join(["| measured | value |", "|---|---|", *rows]) if rows else "Nothing was measured."


def _verdicts(view: View, stage: str, gate: dict[str, Any]) -> str:
    """How each gate on the way here stands, with the words of whoever accepted a closed one."""
    lines = []
    for name, known in view.lineage.get("stages", {}).items():
        said = f" Accepted all the same, with this reason: {plain(known['reason'])}." if known.get("reason") else ""
        lines.append(f"- {plain(known.get('letter', ''))}.{said}")
        if name == stage:
            break
    return "\n".join(lines) or (f"- {plain(gate['letter'])}." if gate.get("letter") else "")


def _data(data: dict[str, Any]) -> str:
    if not data:
        return "Not recorded."
    rows = []
    for side, label in (("train", "trained on"), ("held_out", "held out")):
        half = data.get(side)
        if isinstance(half, dict) and "rows" in half:
            tokens = f", {counted(half['tokens'], 'token')}" if half.get("tokens") else ""
            rows.append(f"{counted(half['rows'], 'row')} {label}{tokens}")
    if data.get("classes"):
        rows = [f"{counted(data.get('train_rows', 0), 'image')} trained on, {data.get('held_out_rows', 0):,} held out"]
    fingerprint = data.get("fingerprint")
    known = f" Fingerprint (xxh3): `{plain(str(fingerprint))}`." if fingerprint else ""
    return f"{_quoted(str(data.get('source', 'unknown')))}: {'; '.join(rows) or 'not counted'}.{known}"


def _settings(view: View) -> str:
    ours = ("name", "description", "output_dir")
    kept = [(row.key, shown(row.value)) for row, _ in view.settings if row.key not in ours]
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in kept)])


def _arithmetic(plan: dict[str, Any]) -> str:
    """What was computed in, where that is more than one word: fp8 that was tried first, fp32 on tensor cores."""
    told = [str(line) for line in plan.get("reasons", [])]
    lines = [plain(line) for line in told if "fp8" in line or "(tf32)" in line]
    return f"Computed in {plain(str(plan.get('precision')))}. {lines[-1]}." if lines else ""


def _samples(folder: RunFolder) -> str:
    try:
        kept = json.loads((folder.demo_outputs / "before_after.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    lines = ["## Before and after", "", f"{plain(kept.get('notice', ''))}", ""]
    for pair in kept.get("answers", [])[:MOST_SAMPLES]:
        for label, key in (("asked", "question"), ("before", "before"), ("after", "after")):
            text = cut(str(pair.get(key, "")), LONGEST_SAMPLE)
            lines += [f"{label.capitalize()}:", "", *(f"    {plain(line)}" for line in text.splitlines() or [""]), ""]
    return "\n".join(lines).rstrip()


def _licence(view: View) -> str:
    known = _known_licence(view)
    base = f"The base model says `{known}`. " if known else ""
    return f"{base}The licences of the base model and of the data hold for this model too."


def _known_licence(view: View) -> str | None:
    name = view.loaded.recipe.model.model_name_or_path if view.loaded else None
    if not name:
        return None
    if name in EMBEDDED_LICENCE:
        return EMBEDDED_LICENCE[name]
    try:
        head = (Path(name) / "README.md").read_text(encoding="utf-8", errors="replace")[:4000]
    except OSError:
        return None
    found = LICENCE.search(head.split("\n---", 1)[0]) if head.startswith("---") else None
    return found[1] if found else None


def _quoted(text: str) -> str:
    return f"`{plain(text).replace('`', '')}`"


def _cell(text: str) -> str:
    return f"`{plain(text).replace('`', '').replace('|', '¦')}`" if text else ""
