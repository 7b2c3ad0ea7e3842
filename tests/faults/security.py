"""What malicious files, names and readers can do: code, secrets, paths, pages, pods, requests, installation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common as results
from tests.faults import canaries, injection, supply, traversal
from tests.faults.fault import Bench, Fault, Outcome, Skipped, counted
from tests.faults.hostile_doors import Findings, Runner, carry
from tests.faults.hostile_files import CORPUS, Place
from tests.faults.hostile_texts import HOSTILE
from tests.faults.rig import Call

INPUTS = 100_000
"""Inputs of the fuzzing, over all readers."""


def commands(bench: Bench) -> Runner:
    """Commands in processes of their own."""
    return lambda words, folder: bench.rig.run(list(words), folder)


def malicious_files(bench: Bench) -> Outcome:
    """Carry the corpus through every door; few of them, and one door each, where only a smoke is asked for."""
    place, found = bench.place("S1"), Findings()
    chosen = CORPUS[:: 9 if bench.smoke else 1]
    for number, hostile in enumerate(chosen):
        spot = Place(place / f"{number:03d}", place / "canary", bench.model)
        carry(hostile, spot, commands(bench), found, most_doors=bench.trials(99, 1))
    figure = f"{len(found.executed)} executions, {found.tried} commands met {len(chosen)} files"
    told = {"executions": len(found.executed), "files": len(chosen), "commands": found.tried, "refused": found.refused,
            "unforeseen": len(found.unforeseen)}  # fmt: skip
    clean = not found.executed and not found.unforeseen
    return Outcome(figure, clean, told, notes=(*found.executed, *found.unforeseen))


def secrets(bench: Bench) -> Outcome:
    """Plant canaries, work, search."""

    def run(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        return bench.rig.run(list(words), folder, variables)

    found = canaries.work(bench.place("S2") / "desk", bench.model, run, short=bench.smoke)
    figure = f"{len(found.leaks)} leaks in {found.files} files and {found.streams} outputs"
    told = {"leaks": len(found.leaks), "files": found.files, "outputs": found.streams, "bytes": found.size}
    worked = list(found.endings.values())[:3] == [0, 0, 0]
    notes = (*found.leaks, *(() if worked else ("the run, its report or its export did not work",)))
    return Outcome(figure, not found.leaks and worked, told, notes=notes)


def leading_out(bench: Bench) -> Outcome:
    """Names, links and archives."""
    found = traversal.lead_out(bench.place("S3") / "root", bench.model, commands(bench), short=bench.smoke)
    figure = f"{len(found.writes)} writes outside, {found.tried} names, links and archives"
    told = {"writes": len(found.writes), "tried": found.tried, "refused": found.refused}
    return Outcome(figure, not found.writes and not found.unforeseen, told, notes=(*found.writes, *found.unforeseen))


def injected_texts(bench: Bench) -> Outcome:
    """Pages and outputs that hold hostile texts."""
    place, said = bench.place("S4"), injection.Said()
    injection.pages(place, said, HOSTILE[:: 4 if bench.smoke else 1])
    injection.streams(bench.place("S4/desk"), bench.model, commands(bench), said)
    figure = f"{len(said.acted)} acted, {said.pages} pages and {said.streams} outputs"
    told = {"acted": len(said.acted), "pages": said.pages, "outputs": said.streams}
    return Outcome(figure, not said.acted, told, notes=tuple(said.acted))


def pods(bench: Bench) -> Outcome:
    """Manifests of every shipped recipe that has a cluster section, and of both kinds of jobs."""
    from modelwright.cluster import documents, lint
    from modelwright.cluster.manifests import build_job, render
    from modelwright.recipe.load import builtin_recipes, load

    texts = [render(build_job(loaded.recipe, loaded.path.parent, target))
             for loaded in (load(name, environ={}) for name in builtin_recipes()) if loaded.recipe.cluster
             for target in ("trainjob", "pytorchjob")]  # fmt: skip
    found = [
        f"{letter}"
        for text in texts
        for letter in lint.lint(documents.parse_manifests(text, "job.yaml"))
        if letter.is_error
    ]
    spoilt = "\n".join(line for line in texts[0].splitlines() if "allowPrivilegeEscalation" not in line)
    noticed = any(
        "allowPrivilegeEscalation" in str(each) for each in lint.lint(documents.parse_manifests(spoilt, "job.yaml"))
    )
    figure = f"{len(found)} violations in {len(texts)} rendered jobs"
    notes = (*found, *(() if noticed else ("a pod that may gain privileges is not noticed",)))
    return Outcome(figure, not notes, {"violations": len(found), "jobs": len(texts)}, notes=notes)


def bad_requests(bench: Bench) -> Outcome:
    """Requests to a board and a server, in a process of their own."""
    place = bench.place("S6")
    call = Call("tests.faults.requests", "measure", (str(place), str(bench.model)))
    trial = bench.rig.fork(call, place)
    if trial.wait():
        if "No module named" in trial.output:
            raise Skipped("needs the extra board: starlette, uvicorn")
        return Outcome("the servers did not start", False, notes=(trial.output[-500:],))
    found: dict[str, Any] = json.loads((place / "requests.json").read_text(encoding="utf-8"))
    figure = counted(len(found["accepted"]), found["requests"], "bad requests accepted")
    told = {"accepted": len(found["accepted"]), "requests": found["requests"], "sound_ones_answered": found["sound"]}
    return Outcome(figure, not found["accepted"] and found["sound"] == 2, told, notes=tuple(found["accepted"]))


def locked_installation(bench: Bench) -> Outcome:
    """The lock against the constraints, and pip against the lock."""
    root = results.ROOT
    if root is None or not (root / supply.LOCK).exists():
        raise Skipped(f"needs a checkout with {supply.LOCK}")
    packages, pins = supply.read(root / supply.LOCK), supply.pinned(root / "constraints.txt")
    stale = [each.name for each in packages if pins.get(each.name, each.version) != each.version]
    bare = [each.name for each in packages if not each.hashes]
    small = [each for each in packages if not each.name.startswith(supply.HUGE)][: 2 if bench.smoke else None]
    place = bench.place("S7")
    brought = supply.fetch("".join(each.lines for each in small), place / "locked")
    if brought.returncode and "HASHES" not in brought.stderr:
        raise Skipped(f"needs an index of packages: {brought.stderr.strip().splitlines()[-1][:120]}")
    other = supply.HASH.sub("--hash=sha256:" + "0" * 64, small[0].lines)
    refused = supply.fetch(other, place / "changed").returncode != 0
    figure = f"{len(packages)} packages locked, {len(small)} brought and held against their hashes"
    told = {"packages": len(packages), "hashes": sum(each.hashes for each in packages), "brought": len(small),
            "stale": stale, "without_hash": bare, "wrong_hash_refused": refused}  # fmt: skip
    notes = [f"{name} is not the version of constraints.txt: make lock" for name in stale]
    notes += [f"{name} has no hash" for name in bare] + ([] if refused else ["a wrong hash is not refused"])
    notes += [brought.stderr[-300:]] if brought.returncode else []
    return Outcome(figure, not notes, told, notes=tuple(notes))


def fuzzing(bench: Bench) -> Outcome:
    """Inputs to every reader, in a process of their own."""
    place, began = bench.place("S8"), time.monotonic()
    inputs = bench.trials(INPUTS, 1200)
    trial = bench.rig.fork(Call("tests.faults.fuzz", "measure", (str(place), inputs, bench.seed)), place)
    code = trial.wait(seconds=3600)
    if code:
        return Outcome(f"the process ended with {code}", False, notes=(trial.output[-800:],))
    found: dict[str, Any] = json.loads((place / "fuzz.json").read_text(encoding="utf-8"))
    escaped = [line for each in found["readers"].values() for line in each["escaped"]]
    figure = f"{len(escaped)} escapes in {found['inputs']:,} inputs to {len(found['readers'])} readers"
    told = {**found, "seconds": round(time.monotonic() - began, 1)}
    enough = found["inputs"] >= inputs
    return Outcome(figure, not escaped and enough, told, notes=tuple(escaped))


NONE = "–"
FAULTS: tuple[Fault, ...] = (
    Fault("S1", "malicious files",
          "pickles, .pt, .npy, YAML tags, Jinja, auto_map, kernels, adapters and Arrow types, by every door",
          "0 code executions, every end foreseen",
          "transformers, 2026: code ran with trust_remote_code off (CVE-2026-4372, 5241)", malicious_files, 420),
    Fault("S2", "secrets",
          "canaries in variables, files, URLs and settings; a run to its export, and mistakes with --debug",
          "0 leaks", "HF Trainer: training_args.bin holds hub_token in clear text", secrets, 90),
    Fault("S3", "paths that lead out", "names, links in run folders, archives as a pod sends them",
          "0 writes outside the run folder", "MLflow: the same kind of CVE five times, 2023 to 2026", leading_out, 90),
    Fault("S4", "texts that act", "HTML, ANSI, CSV and bidi texts from models, rows, recipes and names",
          "0 acted", NONE, injected_texts, 60),
    Fault("S5", "pods", "rendered jobs against Pod Security restricted and restricted-v2",
          "0 violations", NONE, pods, 5),
    Fault("S6", "bad requests", "hosts, origins, methods, keys, paths and bodies, to board and server",
          "0 accepted", NONE, bad_requests, 10),
    Fault("S7", "locked installation", "pip --require-hashes from the lock; a wrong hash",
          "all held, the wrong one refused", NONE, locked_installation, 60),
    Fault("S8", "fuzzing", "damaged files and made-up values to every reader",
          "0 escapes but our letters in 100,000 inputs", NONE, fuzzing, 300),
)  # fmt: skip
"""The lines of the table."""
