"""Security rows of the scorecard: code execution, secrets, paths, pages, pods, requests, installation, fuzzing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from benchmarks import common as results
from modelwright.report import html
from modelwright.runs.folder import RUN_FORMAT, RunFolder, write_json
from tests.faults import leaks
from tests.faults.context import FaultContext, FaultResult, FaultRow, FaultSkipped, count_text
from tests.faults.fork_server import RemoteCall
from tests.faults.hostile import CORPUS, HOSTILE, Findings, HostileFolder, Runner, run_entry_points, write_recipe

CONTROL_CHARACTERS = "\x00\x07\x08\x1b\x9b\u202e\u2066"
"""What a terminal or a reader acts upon."""


class ParsedPage(HTMLParser):
    """Every tag and attribute of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@dataclass
class InjectionFindings:
    """What came of the texts."""

    pages: int = 0
    """Pages that were drawn with one."""
    streams: int = 0
    """Outputs of commands that met some."""
    acted: list[str] = field(default_factory=list)
    """Where one was more than text."""


def run_with_text(folder: Path, text: str, steps: int = 20) -> RunFolder:
    """A run folder whose name, question, answers, notes, source and verdict are this text."""
    run = RunFolder(folder / "run")
    step = {"event": "step", "stage": "sft", "steps": steps, "grad_norm": 1.0, "learning_rate": 1e-3, "health": "ok",
            "tokens_per_second": 100.0, "step_seconds": 1.0, "peak_memory_bytes": 10**9}  # fmt: skip
    answers = [{"question": text, "before": text, "after": text}]
    events: list[dict[str, Any]] = [
        {"event": "run", "run_format": RUN_FORMAT, "recipe": text, "stages": ["sft"], "world": 1, "device": text},
        {"event": "stage_started", "stage": "sft"},
        *({**step, "step": number, "loss": 4 / number} for number in range(1, steps + 1)),
        {"event": "answers", "stage": "sft", "answers": answers, "notice": text},
        {"event": "note", "message": text},
        {"event": "verdict", "stage": "sft", "open": True, "message": text, "metrics": {"eval_loss": 1.0}},
        {"event": "done", "seconds": 1.0},
    ]
    run.path.mkdir(parents=True)
    lines = [json.dumps({"time": float(time), **event}) for time, event in enumerate(events)]
    run.journal.write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(run.data_manifest("sft"), {"source": text, "train": {"rows": 3}, "extra": text})
    checks = [{"metric": "eval_loss", "value": 1.0, "requirement": text, "passed": True}]
    write_json(run.gate("sft"), {"open": True, "checks": checks, "metrics": {"eval_loss": 1.0}})
    return run


def check_pages(folder: Path, findings: InjectionFindings, texts: Sequence[str] = HOSTILE) -> None:
    """Render a report for each text, and compare its tags with those of a harmless text."""
    plain = ParsedPage(html.write_report(run_with_text(folder / "plain", "Why?")).read_text(encoding="utf-8"))
    for number, text in enumerate(texts):
        written = html.write_report(run_with_text(folder / f"page-{number}", text)).read_text(encoding="utf-8")
        parsed = ParsedPage(written)
        findings.pages += 1
        if parsed.tags != plain.tags or {name for name, _ in parsed.attributes} != {
            name for name, _ in plain.attributes
        }:
            findings.acted.append(f"report: {text[:60]!r} makes tags or attributes")
        findings.acted += [f"report: {text[:60]!r} leaves {mark!r}" for mark in CONTROL_CHARACTERS if mark in written]


def check_streams(folder: Path, model: Path, run: Runner, findings: InjectionFindings) -> None:
    """Let every verb that quotes recipes and rows meet the texts, its output going to a file: nothing may act there."""
    for arguments in _commands(folder, model):
        _, printed = run(arguments, folder)
        findings.streams += 1
        findings.acted += [
            f"{' '.join(arguments[:2])} prints {mark!r}" for mark in CONTROL_CHARACTERS if mark in printed
        ]


def _commands(folder: Path, model: Path) -> Iterator[Sequence[str]]:
    mark = "\x1b]0;title\x07\x1b[2J\u202e"
    recipe = write_recipe(folder / "recipe.yaml", model, {"train_file": "rows.jsonl"})
    findings = json.loads(recipe.read_text("utf-8"))
    findings["data"]["system_prompt"] = mark
    recipe.write_text(
        json.dumps({**findings, "description": mark, "compare": {"prompts": [mark], "max_new_tokens": 1}}), "utf-8"
    )
    for verb in ("check", "explain", "plan", "run"):
        yield verb, str(recipe)
    for verb in ("report", "compare", "gate"):
        yield verb, str(folder / "run")
    yield "ask", str(folder / "run"), mark
    wrong = folder / "wrong.yaml"
    wrong.write_text(json.dumps({**findings, mark: mark, "sft": {"precision": mark, "max_steps": mark}}), "utf-8")
    for verb in ("check", "explain", "run"):
        yield verb, str(wrong)
    rows = folder / "hostile.jsonl"
    rows.write_text(
        "".join(json.dumps({mark: mark, "prompt": value}) + "\n" for value in (mark, 7, "")) + mark, "utf-8"
    )
    yield "data", "audit", str(rows)
    recipe.write_text(json.dumps({**findings, "data": {"train_file": str(rows)}}), "utf-8")
    for arguments in (("data", "audit"), ("data", "show"), ("run",)):
        yield *arguments, str(recipe)
    yield "run", f"{mark}.yaml"
    yield "run", str(recipe), "--set", f"{mark}={mark}"
    yield "report", mark


LOCK = "requirements.lock"
HUGE = ("torch", "triton", "cuda-", "nvidia-")
"""Gigabytes that the check of hashes does not bring here."""
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? ?\\?$")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class LockedPackage:
    """One package of the lock."""

    name: str
    """As the index calls it, in lower case with dashes."""
    version: str
    """Exactly this one."""
    lines: str
    """Its lines in the lock."""

    @property
    def hashes(self) -> int:
        """Files of it that may be installed."""
        return len(HASH.findall(self.lines))


def normalized_name(name: str) -> str:
    """A package's name as all tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> list[LockedPackage]:
    """The packages of a lock."""
    packages: list[LockedPackage] = []
    for block in re.split(r"\n(?=\S)", path.read_text(encoding="utf-8")):
        if match := PIN.match(block.splitlines()[0] if block else ""):
            packages.append(LockedPackage(normalized_name(match["name"]), match["version"], block.rstrip() + "\n"))
    return packages


def read_constraints(path: Path) -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "==" in line and line[0] != "#")
    return {normalized_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def pip_download(lock: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Let pip download the packages of a lock, each file checked against its hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    path.write_text(lock, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary=:all:",
               "--quiet", "--disable-pip-version-check", "--dest", str(folder / "files"), "-r", str(path)]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


INPUTS = 100_000
"""Inputs of the fuzzing, over all readers."""


def run_command(context: FaultContext) -> Runner:
    """Commands in processes of their own."""
    return lambda arguments, folder: context.fork_server.run(list(arguments), folder)


def malicious_files(context: FaultContext) -> FaultResult:
    """Run every command on the corpus; in a smoke test few files, and one command each."""
    folder, findings = context.fresh_folder("S1"), Findings()
    files = CORPUS[:: 9 if context.smoke else 1]
    for number, hostile in enumerate(files):
        target = HostileFolder(folder / f"{number:03d}", folder / "canary", context.model)
        run_entry_points(hostile, target, run_command(context), findings, max_commands=context.num_trials(99, 1))
    figure = f"{len(findings.executed)} of {findings.commands} commands ran code from {len(files)} malicious files"
    numbers = {"executions": len(findings.executed), "files": len(files), "commands": findings.commands,
               "refused": findings.refused, "unforeseen": len(findings.crashes)}  # fmt: skip
    problems = (*findings.executed, *findings.crashes)
    return FaultResult(figure, not problems, numbers, notes=problems)


def secrets(context: FaultContext) -> FaultResult:
    """Plant canaries, work, search."""

    def run(arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        return context.fork_server.run(list(arguments), folder, variables)

    search = leaks.search_leaks(context.fresh_folder("S2") / "desk", context.model, run, short=context.smoke)
    figure = f"{len(search.leaks)} secrets found in {search.files} written files and {search.streams} outputs"
    numbers = {"leaks": len(search.leaks), "files": search.files, "outputs": search.streams, "bytes": search.size}
    worked = list(search.endings.values())[:3] == [0, 0, 0]
    notes = (*search.leaks, *(() if worked else ("the run, its report or its export did not work",)))
    return FaultResult(figure, not search.leaks and worked, numbers, notes=notes)


def path_traversal(context: FaultContext) -> FaultResult:
    """Names, links and archives."""
    findings = leaks.run_traversal(
        context.fresh_folder("S3") / "root", context.model, run_command(context), short=context.smoke
    )
    figure = f"{len(findings.writes)} of {findings.tried} attempts wrote outside the run folder"
    numbers = {"writes": len(findings.writes), "tried": findings.tried, "refused": findings.refused}
    return FaultResult(
        figure, not findings.writes and not findings.crashes, numbers, notes=(*findings.writes, *findings.crashes)
    )


def injected_texts(context: FaultContext) -> FaultResult:
    """Pages and outputs that hold hostile texts."""
    folder, findings = context.fresh_folder("S4"), InjectionFindings()
    check_pages(folder, findings, HOSTILE[:: 4 if context.smoke else 1])
    check_streams(context.fresh_folder("S4/desk"), context.model, run_command(context), findings)
    figure = f"{len(findings.acted)} codes executed in {findings.pages} pages and {findings.streams} outputs"
    numbers = {"acted": len(findings.acted), "pages": findings.pages, "outputs": findings.streams}
    return FaultResult(figure, not findings.acted, numbers, notes=tuple(findings.acted))


def pods(context: FaultContext) -> FaultResult:
    """Manifests of every shipped recipe that has a cluster section, and of both kinds of jobs."""
    from modelwright.cluster import documents, lint
    from modelwright.cluster.manifests import build_job, render
    from modelwright.recipe.load import builtin_recipes, load

    texts = [render(build_job(loaded.recipe, loaded.path.parent, target))
             for loaded in (load(name, environ={}) for name in builtin_recipes()) if loaded.recipe.cluster
             for target in ("trainjob", "pytorchjob")]  # fmt: skip
    violations = [
        f"{problem}"
        for text in texts
        for problem in lint.lint(documents.parse_manifests(text, "job.yaml"))
        if problem.is_error
    ]
    unsafe = "\n".join(line for line in texts[0].splitlines() if "allowPrivilegeEscalation" not in line)
    detected = any(
        "allowPrivilegeEscalation" in str(each) for each in lint.lint(documents.parse_manifests(unsafe, "job.yaml"))
    )
    figure = f"{len(violations)} violations in {len(texts)} job manifests"
    notes = (*violations, *(() if detected else ("a pod that may gain privileges is not noticed",)))
    return FaultResult(figure, not notes, {"violations": len(violations), "jobs": len(texts)}, notes=notes)


def bad_requests(context: FaultContext) -> FaultResult:
    """Requests to a board and a server, in a process of their own."""
    folder = context.fresh_folder("S6")
    call = RemoteCall("tests.faults.http_requests", "measure", (str(folder), str(context.model)))
    process = context.fork_server.fork(call, folder)
    if process.wait():
        if "No module named" in process.output:
            raise FaultSkipped("needs the extra dashboard: starlette, uvicorn")
        return FaultResult("the servers did not start", False, notes=(process.output[-500:],))
    result: dict[str, Any] = json.loads((folder / "requests.json").read_text(encoding="utf-8"))
    figure = count_text(len(result["accepted"]), result["requests"], "bad requests accepted")
    numbers = {
        "accepted": len(result["accepted"]),
        "requests": result["requests"],
        "sound_ones_answered": result["sound"],
    }
    return FaultResult(
        figure, not result["accepted"] and result["sound"] == 2, numbers, notes=tuple(result["accepted"])
    )


def locked_installation(context: FaultContext) -> FaultResult:
    """The lock against the constraints, and pip against the lock."""
    root = results.ROOT
    if root is None or not (root / LOCK).exists():
        raise FaultSkipped(f"needs a checkout with {LOCK}")
    packages, pins = read_lock(root / LOCK), read_constraints(root / "constraints.txt")
    stale = [each.name for each in packages if pins.get(each.name, each.version) != each.version]
    unhashed = [each.name for each in packages if not each.hashes]
    small = [each for each in packages if not each.name.startswith(HUGE)][: 2 if context.smoke else None]
    folder = context.fresh_folder("S7")
    download = pip_download("".join(each.lines for each in small), folder / "locked")
    if download.returncode and "HASHES" not in download.stderr:
        raise FaultSkipped(f"needs an index of packages: {download.stderr.strip().splitlines()[-1][:120]}")
    wrong = HASH.sub("--hash=sha256:" + "0" * 64, small[0].lines)
    refused = pip_download(wrong, folder / "changed").returncode != 0
    right = 0 if download.returncode else len(small)
    figure = (
        f"wrong hash {'refused' if refused else 'accepted'}; "
        f"{right} of {len(small)} right hashes accepted (torch and CUDA not tried)"
    )
    numbers = {"packages": len(packages), "hashes": sum(each.hashes for each in packages), "brought": len(small),
            "stale": stale, "without_hash": unhashed, "wrong_hash_refused": refused}  # fmt: skip
    notes = [f"{name} is not the version of constraints.txt: make lock" for name in stale]
    notes += [f"{name} has no hash" for name in unhashed] + ([] if refused else ["a wrong hash is not refused"])
    notes += [download.stderr[-300:]] if download.returncode else []
    return FaultResult(figure, not notes, numbers, notes=tuple(notes))


def fuzzing(context: FaultContext) -> FaultResult:
    """Inputs to every reader, in a process of their own."""
    folder, began = context.fresh_folder("S8"), time.monotonic()
    inputs = context.num_trials(INPUTS, 1200)
    process = context.fork_server.fork(
        RemoteCall("tests.faults.fuzz", "measure", (str(folder), inputs, context.seed)), folder
    )
    code = process.wait(seconds=3600)
    if code:
        return FaultResult(f"the process ended with {code}", False, notes=(process.output[-800:],))
    result: dict[str, Any] = json.loads((folder / "fuzz.json").read_text(encoding="utf-8"))
    escaped = [line for each in result["readers"].values() for line in each["escaped"]]
    figure = f"{len(escaped)} of {result['inputs']:,} inputs crashed any of {len(result['readers'])} parsers"
    numbers = {**result, "seconds": round(time.monotonic() - began, 1)}
    enough = result["inputs"] >= inputs
    return FaultResult(figure, not escaped and enough, numbers, notes=tuple(escaped))


NONE = "–"


FAULTS = (
    FaultRow("S1", "malicious files",
             "pickles, .pt, .npy, YAML tags, Jinja, auto_map, kernels, adapters and Arrow types, read by every command",
             "0 code executions, 0 crashes",
             "transformers ran code with trust_remote_code off (CVE-2026-4372, CVE-2026-5241)", malicious_files, 420),
    FaultRow("S2", "secrets in variables, files and URLs",
             "canaries in variables, files, URLs and settings; a run to its export, and mistakes with --debug",
             "0 leaks", "HF Trainer: training_args.bin contains hub_token in clear text", secrets, 90),
    FaultRow("S3", "paths that lead out of the run folder", "names, links in run folders, archives as a pod sends them",
             "0 writes outside the run folder", "MLflow: five CVEs of this kind, 2023 to 2026",
             path_traversal, 90),
    FaultRow("S4", "HTML or terminal codes in data and names",
             "HTML, ANSI, CSV and bidi texts from models, rows, recipes and names", "0 executed", NONE, injected_texts,
             60),
    FaultRow("S5", "pod security rules (restricted, restricted-v2)",
             "rendered jobs against Pod Security restricted and restricted-v2",
             "0 violations", NONE, pods, 5),
    FaultRow("S6", "bad HTTP requests to serve and dashboard",
             "hosts, origins, methods, keys, paths and bodies, to board and server",
             "0 accepted", NONE, bad_requests, 10),
    FaultRow("S7", "a wrong hash in the lock file", "pip --require-hashes from the lock; a wrong hash",
             "all verified, the wrong one refused", NONE, locked_installation, 60),
    FaultRow("S8", "damaged and random inputs (fuzzing)", "damaged files and generated values to every reader",
             "only errors of ours in 100,000 inputs", NONE, fuzzing, 300),
)  # fmt: skip
