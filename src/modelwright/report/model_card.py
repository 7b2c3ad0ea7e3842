"""Render the Hugging Face model card of a run: base model, data, evaluation, settings and limitations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from modelwright import __version__
from modelwright.recipe.stage_specs import throughput_unit
from modelwright.report.formatting import format_setting, pluralize, single_line, truncate
from modelwright.report.history import RunHistory
from modelwright.report.view import IDENTITY_KEYS, RunView, load_run_view
from modelwright.runs.folder import RunFolder

MAX_SAMPLES = 3
MAX_SAMPLE_CHARS = 600
EMBEDDED_LICENSES = {"smollm2-135m-instruct": "apache-2.0"}
"""Licenses of the embedded models."""
EMBEDDED_HUB_NAMES = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Names of the embedded models on the hub."""
LICENSE_RE = re.compile(r"^license:\s*([\w.-]{1,40})\s*$", re.MULTILINE)


def render_model_card(folder: RunFolder, stage: str, export_format: str = "") -> str:
    """The card of a judged stage's model; `export_format` says how it was exported."""
    view = load_run_view(folder, RunHistory(), [stage])
    gate, data = view.gates.get(stage, {}), view.data.get(stage, {})
    parts = [
        _front_matter(view, stage),
        f"# {view.name}",
        single_line(view.description),
        export_format,
        _provenance(view, stage),
        "## Evaluation",
        _metrics_table(gate.get("metrics", {})),
        _gate_results(view, stage, gate),
        "## Data",
        _data(data),
        "## Non-default settings",
        _settings(view),
        _precision(view.plan.get(stage, {})),
        _samples(folder),
        "## Limitations",
        "No claim is made beyond these measurements: it was measured on the rows held out from its own data, and on "
        "nothing else. It may be wrong, biased or unsafe in everything that was not measured, as its base may be.",
        "## License",
        _license(view),
        f"Made with Modelwright {__version__}; `recipe.yaml` of the run reproduces it.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(view: RunView, stage: str) -> str:
    recipe = view.loaded.recipe if view.loaded else None
    library = "modelwright"
    if throughput_unit(stage) == "tokens":
        adapter = (view.folder.model(stage) / "adapter_config.json").exists()
        library = "peft" if adapter else "transformers"
    lines = ["---", f"library_name: {library}", f"tags: [modelwright, {stage}]"]
    name = recipe.model.model_name_or_path if recipe else None
    base = EMBEDDED_HUB_NAMES.get(name or "", name or "")
    if recipe and base == name and not recipe.model.revision:  # a folder has no name on the hub
        base = Path(base).name if library != "modelwright" else ""
    if base:
        lines.append(f"base_model: {json.dumps(base)}")
    if license_id := _base_license(view):
        lines.append(f"license: {license_id}")
    return "\n".join([*lines, "---"])


def _provenance(view: RunView, stage: str) -> str:
    recipe = view.loaded.recipe if view.loaded else None
    if recipe is None:
        return ""
    revision = f" at `{recipe.model.revision}`" if recipe.model.revision else ""
    parent = recipe.parent_stage(stage)
    start = f"It started from this run's {parent} model. " if parent else ""
    resume_config = view.results.get(stage, {}).get("resume_config", {})
    model_fingerprint = resume_config.get("model.fingerprint")
    contents = f" Fingerprint of what it started from: {_code_span(model_fingerprint)}." if model_fingerprint else ""
    return f"Base model: {_code_span(recipe.model.display_name)}{revision}. {start}Stage: {stage}.{contents}"


def _metrics_table(metrics: dict[str, Any]) -> str:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    rows = [f"| {single_line(name)} | {value:.4g} |" for name, value in numbers.items()]
    return "\n".join(["| metric | value |", "|---|---|", *rows]) if rows else "Nothing was measured."


def _gate_results(view: RunView, stage: str, gate: dict[str, Any]) -> str:
    """Verdicts of the stages up to this one, with the reasons of gates accepted manually."""
    lines = []
    for name, record in view.lineage.get("stages", {}).items():
        acceptance = f" Accepted manually: {single_line(record['reason'])}." if record.get("reason") else ""
        lines.append(f"- {single_line(record.get('message', ''))}.{acceptance}")
        if name == stage:
            break
    return "\n".join(lines) or (f"- {single_line(gate['message'])}." if gate.get("message") else "")


def _data(data: dict[str, Any]) -> str:
    if not data:
        return "Not recorded."
    rows = []
    for split_name, label in (("train", "trained on"), ("held_out", "held out")):
        split = data.get(split_name)
        if isinstance(split, dict) and "rows" in split:
            tokens = f", {pluralize(split['tokens'], 'token')}" if split.get("tokens") else ""
            rows.append(f"{pluralize(split['rows'], 'row')} {label}{tokens}")
    if data.get("classes"):
        images = pluralize(data.get("train_rows", 0), "image")
        rows = [f"{images} trained on, {data.get('held_out_rows', 0):,} held out"]
    fingerprint = data.get("fingerprint")
    fingerprint_text = f" Fingerprint (xxh3): `{single_line(str(fingerprint))}`." if fingerprint else ""
    return f"{_code_span(str(data.get('source', 'unknown')))}: {'; '.join(rows) or 'not counted'}.{fingerprint_text}"


def _settings(view: RunView) -> str:
    settings = {row.key: format_setting(row.value) for row, _ in view.settings if row.key not in IDENTITY_KEYS}
    rows = [f"| {key} | {_table_cell(value)} |" for key, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _precision(plan: dict[str, Any]) -> str:
    """The precision and its reason, for fp8 and tf32."""
    reasons = [str(line) for line in plan.get("reasons", [])]
    lines = [single_line(line) for line in reasons if "fp8" in line or "use tf32" in line]
    return f"Computed in {single_line(str(plan.get('precision')))}. {lines[-1]}." if lines else ""


def _samples(folder: RunFolder) -> str:
    try:
        before_after = json.loads((folder.demo_outputs / "before_after.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    lines = ["## Before and after", "", f"{single_line(before_after.get('notice', ''))}", ""]
    for pair in before_after.get("answers", [])[:MAX_SAMPLES]:
        for label, key in (("prompt", "question"), ("before", "before"), ("after", "after")):
            text = truncate(str(pair.get(key, "")), MAX_SAMPLE_CHARS)
            quoted = [f"    {single_line(line)}" for line in text.splitlines() or [""]]
            lines += [f"{label.capitalize()}:", "", *quoted, ""]
    return "\n".join(lines).rstrip()


def _license(view: RunView) -> str:
    license_id = _base_license(view)
    base = f"The base model says `{license_id}`. " if license_id else ""
    return f"{base}The licenses of the base model and of the data also apply to this model."


def _base_license(view: RunView) -> str | None:
    name = view.loaded.recipe.model.model_name_or_path if view.loaded else None
    if not name:
        return None
    if name in EMBEDDED_LICENSES:
        return EMBEDDED_LICENSES[name]
    try:
        head = (Path(name) / "README.md").read_text(encoding="utf-8", errors="replace")[:4000]
    except OSError:
        return None
    match = LICENSE_RE.search(head.split("\n---", 1)[0]) if head.startswith("---") else None
    return match[1] if match else None


def _code_span(text: str) -> str:
    return f"`{single_line(text).replace('`', '')}`"


def _table_cell(text: str) -> str:
    return f"`{single_line(text).replace('`', '').replace('|', '¦')}`" if text else ""
