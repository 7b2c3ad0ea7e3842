"""What the benchmarks share: results with their date, commit and machine, and the command line."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import typer

from modelwright.errors import ModelwrightError, UsageError
from modelwright.launch.supervisor import package_pythonpath
from modelwright.runs.caches import prepare_environment
from modelwright.runs.folder import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
PACKAGES = ("modelwright", "torch", "transformers", "trl", "torchtitan")
Save = Annotated[bool, typer.Option("--save", help="Write the result to benchmarks/results.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def run(main: Callable[..., None]) -> None:
    """Run a benchmark's `main` as a command; what is wrong with its options is printed without a traceback."""
    prepare_environment()
    try:
        typer.run(main)
    except ModelwrightError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def report(
    name: str,
    measure: Callable[[], dict[str, Any]],
    lines: Callable[[dict[str, Any]], Iterable[str]],
    save_result: bool,
    as_json: bool,
    merge: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Measure, print, and save; `merge` puts the figures among those that were saved before."""
    with redirect_stdout(sys.stderr):  # peers print while they train; the result is the only object on stdout
        figures = measure()
    measured = result(name, figures)
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(lines(figures)))
    if save_result:
        measured["figures"] = merge(figures) if merge else figures
        print(f"saved to {save(measured)}", file=sys.stderr)


def result(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """One measurement, ready to be kept."""
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "figures": figures,
    }


def kept(name: str) -> dict[str, Any] | None:
    """What was kept under a name before, where there is something."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    found: dict[str, Any] | None = read_json(path) if path.exists() else None
    return found


def save(measured: dict[str, Any]) -> Path:
    """Write a result to benchmarks/results/NAME.json."""
    path = ROOT / "benchmarks" / "results" / f"{measured['name']}.json"
    write_json(path, measured)
    return path


def installed(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """What computed; the machine's own name is left out, since it tells nobody anything."""
    return {
        "architecture": platform.machine(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
    }


def cpu_model() -> str | None:
    """What the processor calls itself (on ARM only lscpu knows)."""
    lines = _output(["lscpu"]).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), None)


def commit() -> str | None:
    """The commit of the checkout, with ``-dirty`` where files differ from it; None outside of one."""
    return _output(["git", "describe", "--always", "--dirty", "--exclude=*"], ROOT).strip() or None


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: this very package, one thread, no hub."""
    paths = os.pathsep.join([package_pythonpath(), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _output(command: list[str], folder: Path | None = None) -> str:
    """What a command prints; nothing where it fails or is not there."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def children_of(pid: int) -> list[int]:
    """Every process below one, by the kernel's own list."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            below = [int(word) for word in tasks.read_text(encoding="utf-8").split()]
            found += below
            waiting += below
    return found


class Progress:
    """One measurement's clock."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.perf_counter()

    def tell(self, what: str) -> None:
        """A line with the seconds since it began."""
        print(f"{time.perf_counter() - self._began:7.1f} s  {self._name}: {what}", file=sys.stderr, flush=True)


Report = TypeVar("Report")
PROFILED_STEPS = 2
"""Steps that are watched; they are slower for it and not timed."""
MOST_KERNELS = 30
"""Kernels that are told."""
LONGEST_GAPS = 5
"""Moments without work that are told."""


class Span(NamedTuple):
    """One piece of work of the device."""

    start: float
    end: float
    """Microseconds."""
    name: str


class Kernels:
    """Watches the last steps of a training where that is asked for."""

    def __init__(self, asked: bool) -> None:
        self._asked = asked
        self.table: list[dict[str, Any]] = []
        """The longest kernels: name, milliseconds and calls in a step; before them all together, and the moments
        without any."""

    def during(self, steps: Iterator[Report], count: int) -> Iterator[Report]:
        """The same steps, `count` in all."""
        if not self._asked or count <= PROFILED_STEPS:
            yield from steps
            return
        for number, report in enumerate(steps, 1):
            yield report
            if number == count - PROFILED_STEPS:
                break
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watched:
            yield from steps
            if on_gpu:
                torch.cuda.synchronize()
        self.table = _kernel_table(watched.key_averages(), on_gpu)
        if on_gpu:
            spans = [
                Span(event.time_range.start, event.time_range.end, event.name)
                for event in watched.events()
                if event.device_type.name == "CUDA"
            ]
            self.table[1:1] = gpu_idle_gaps(spans)

    def lines(self) -> list[str]:
        """The table for people."""
        return [f"{row['milliseconds']:9.3f} ms {row['calls']:7.1f} × {row['name'][:120]}" for row in self.table]


def gpu_idle_gaps(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """How long a step the device stood still, and the longest times it did: each between which kernels.

    Work of several streams overlaps; what stands still is between the end of all that began before and the next.
    """
    found: list[tuple[float, str]] = []
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and span.start > last.end:
            found.append((span.start - last.end, f"{last.name[:50]} and {span.name[:50]}"))
        last = span if last is None or span.end > last.end else last
    told = [("standing still", sum(length for length, _ in found), len(found))]
    told += [
        (f"standing still between {names}", length, 1) for length, names in sorted(found, reverse=True)[:LONGEST_GAPS]
    ]
    return [_kernel_row(*each) for each in told]


def _kernel_row(name: str, microseconds: float, calls: float) -> dict[str, Any]:
    return {
        "name": name,
        "milliseconds": round(microseconds / 1000 / PROFILED_STEPS, 3),
        "calls": round(calls / PROFILED_STEPS, 1),
    }


def _kernel_table(events: Any, on_gpu: bool) -> list[dict[str, Any]]:
    found = [
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in events
        if (event.device_type.name == "CUDA") == on_gpu
    ]
    whole = ("all together", sum(spent for _, spent, _ in found), sum(calls for *_, calls in found))
    longest = sorted(found, key=lambda each: -each[1])[:MOST_KERNELS]
    return [_kernel_row(*each) for each in (whole, *longest)]


Figures = dict[str, Any]


class Named(Protocol):
    """A way to do the work."""

    @property
    def name(self) -> str:
        """What the table calls it."""


AnyVariant = TypeVar("AnyVariant", bound=Named)


def select_variants(ways: Sequence[AnyVariant], words: Sequence[str]) -> list[AnyVariant]:
    """Ways of which a word is the name or, where it is no way's name, a part; without words all but those aside."""
    names = [way.name for way in ways]
    if strange := [word for word in words if not any(word in name for name in names)]:
        raise UsageError(f"--way is {strange[0]!r}, which no way has in its name; there are: {' | '.join(names)}")
    if not words:
        return [way for way in ways if not getattr(way, "aside", False)]
    parts = [word for word in words if word not in names]
    return [way for way in ways if way.name in words or any(word in way.name for word in parts)]


def run_variants(
    ways: Sequence[AnyVariant], kernels: bool, train: Callable[[AnyVariant, Kernels], Figures]
) -> dict[str, Figures]:
    """The figures of each way in turn, told as they come; one that fails tells why and the others go on."""
    told: dict[str, Figures] = {}
    for way in ways:
        free_device()
        watch = Kernels(kernels)
        try:
            told[way.name] = train(way, watch)
        except Exception as error:  # one way must not take the others with it
            told[way.name] = {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        print("\n".join([f"{way.name} {told[way.name]}", *watch.lines()]), flush=True)
        if watch.table:
            told[way.name]["kernels"] = watch.table
    return told


def variant_lines(ways: dict[str, Figures], line: Callable[[str, Figures], str]) -> Iterator[str]:
    """A line for each way: its figures, or why there are none."""
    for name, way in ways.items():
        yield f"  {name}: {way['failed'] if 'failed' in way else line(name, way)}"


def free_device() -> None:
    """Free what the way before held, and forget what it compiled."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()


def ratio(ways: dict[str, Any], figure: str) -> dict[str, float]:
    """The fastest of ours over the fastest of the peers', where both were measured."""
    ours = [way[figure] for name, way in ways.items() if name.startswith("ours") and figure in way]
    theirs = [way[figure] for name, way in ways.items() if not name.startswith("ours") and figure in way]
    return {"ratio": round(max(ours) / max(theirs), 2)} if ours and theirs else {}


def require_finite(losses: list[float]) -> None:
    """Refuse the speed of a training that has learnt nothing."""
    if bad := [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]:
        raise ArithmeticError(f"the loss is no number from step {bad[0]} on; how fast that was says nothing")


def now() -> float:
    """The time when the device has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
