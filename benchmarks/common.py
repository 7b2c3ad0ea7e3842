"""What the benchmarks share: results with date, commit and machine, the command line, variants, kernel profiles."""

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
    """Run a benchmark's `main` as a command; our errors are printed without a traceback."""
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
    """Measure, print, and save; `merge` adds the figures to the saved ones."""
    with redirect_stdout(sys.stderr):  # peers print while they train; the result is the only object on stdout
        figures = measure()
    measured = result(name, figures)
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(lines(figures)))
    if save_result:
        measured["figures"] = merge(figures) if merge else figures
        print(f"saved to {save(measured)}", file=sys.stderr)


def result(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with name, date, commit and machine."""
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "figures": figures,
    }


def load_result(name: str) -> dict[str, Any] | None:
    """The saved result of a name, or None."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    saved: dict[str, Any] | None = read_json(path) if path.exists() else None
    return saved


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
    """CPU and package versions, without the host name."""
    return {
        "architecture": platform.machine(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
    }


def cpu_model() -> str | None:
    """The model name of the CPU (on ARM only lscpu knows it)."""
    lines = _output(["lscpu"]).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), None)


def commit() -> str | None:
    """The commit of the checkout, with ``-dirty`` if files differ from it; None outside of one."""
    return _output(["git", "describe", "--always", "--dirty", "--exclude=*"], ROOT).strip() or None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: this package, one thread, no hub."""
    paths = os.pathsep.join([package_pythonpath(), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _output(command: list[str], folder: Path | None = None) -> str:
    """What a command prints; nothing if it fails or is not installed."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def children_of(pid: int) -> list[int]:
    """All descendants of a process, by /proc."""
    descendants: list[int] = []
    queue = [pid]
    while queue:
        for tasks in Path(f"/proc/{queue.pop()}/task").glob("*/children"):
            children = [int(child) for child in tasks.read_text(encoding="utf-8").split()]
            descendants += children
            queue += children
    return descendants


class Progress:
    """Prints lines with the seconds since it was made."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.perf_counter()

    def log(self, what: str) -> None:
        """Print a line."""
        print(f"{time.perf_counter() - self._began:7.1f} s  {self._name}: {what}", file=sys.stderr, flush=True)


Report = TypeVar("Report")
PROFILED_STEPS = 2
"""Profiled steps at the end; they are slower and not timed."""
MAX_KERNELS = 30
"""Kernels that are listed."""
MAX_GAPS = 5
"""Idle gaps that are listed."""


class Span(NamedTuple):
    """One kernel on the device."""

    start: float
    end: float
    """Microseconds."""
    name: str


class KernelProfile:
    """Profiles the kernels of the last steps of a training, if enabled."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.table: list[dict[str, Any]] = []
        """Name, milliseconds and calls per step: the total, the idle gaps, and the longest kernels."""

    def wrap(self, steps: Iterator[Report], count: int) -> Iterator[Report]:
        """The same `count` steps."""
        if not self._enabled or count <= PROFILED_STEPS:
            yield from steps
            return
        for number, report in enumerate(steps, 1):
            yield report
            if number == count - PROFILED_STEPS:
                break
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            yield from steps
            if on_gpu:
                torch.cuda.synchronize()
        self.table = _kernel_table(profiler.key_averages(), on_gpu)
        if on_gpu:
            spans = [
                Span(event.time_range.start, event.time_range.end, event.name)
                for event in profiler.events()
                if event.device_type.name == "CUDA"
            ]
            self.table[1:1] = gpu_idle_gaps(spans)

    def lines(self) -> list[str]:
        """The table as text."""
        return [f"{row['milliseconds']:9.3f} ms {row['calls']:7.1f} × {row['name'][:120]}" for row in self.table]


def gpu_idle_gaps(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The idle time of the device per step, and its longest gaps with the kernels around them.

    Kernels of several streams overlap; a gap is between the end of all kernels that began before and the next.
    """
    gaps: list[tuple[float, str]] = []
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and span.start > last.end:
            gaps.append((span.start - last.end, f"{last.name[:50]} and {span.name[:50]}"))
        last = span if last is None or span.end > last.end else last
    longest = sorted(gaps, reverse=True)[:MAX_GAPS]
    rows = [("idle", sum(length for length, _ in gaps), len(gaps))]
    rows += [(f"idle between {names}", length, 1) for length, names in longest]
    return [_kernel_row(*row) for row in rows]


def _kernel_row(name: str, microseconds: float, calls: float) -> dict[str, Any]:
    return {
        "name": name,
        "milliseconds": round(microseconds / 1000 / PROFILED_STEPS, 3),
        "calls": round(calls / PROFILED_STEPS, 1),
    }


def _kernel_table(events: Any, on_gpu: bool) -> list[dict[str, Any]]:
    kernels = [
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in events
        if (event.device_type.name == "CUDA") == on_gpu
    ]
    total = ("all together", sum(spent for _, spent, _ in kernels), sum(calls for *_, calls in kernels))
    longest = sorted(kernels, key=lambda kernel: -kernel[1])[:MAX_KERNELS]
    return [_kernel_row(*row) for row in (total, *longest)]


Figures = dict[str, Any]
NO_TRL = "trl is not installed, so there is nothing to compare with"


class Named(Protocol):
    """A row of a table."""

    @property
    def name(self) -> str:
        """Its name in the table."""


AnyVariant = TypeVar("AnyVariant", bound=Named)


def select_variants(variants: Sequence[AnyVariant], words: Sequence[str]) -> list[AnyVariant]:
    """Variants whose name is a word or, where it is no variant's name, contains it; without words all not optional."""
    names = [variant.name for variant in variants]
    if unknown := [word for word in words if not any(word in name for name in names)]:
        raise UsageError(f"--variant is {unknown[0]!r}, which is in no name; there are: {' | '.join(names)}")
    if not words:
        return [variant for variant in variants if not getattr(variant, "optional", False)]
    parts = [word for word in words if word not in names]
    return [variant for variant in variants if variant.name in words or any(part in variant.name for part in parts)]


def run_variants(
    variants: Sequence[AnyVariant], kernels: bool, train: Callable[[AnyVariant, KernelProfile], Figures]
) -> dict[str, Figures]:
    """The figures of each variant in turn, printed as they come; one that fails says why and the others run."""
    measured: dict[str, Figures] = {}
    for variant in variants:
        free_device()
        profile = KernelProfile(kernels)
        try:
            figures = train(variant, profile)
        except Exception as error:
            figures = {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        print("\n".join([f"{variant.name} {figures}", *profile.lines()]), flush=True)
        measured[variant.name] = figures | ({"kernels": profile.table} if profile.table else {})
    return measured


def variant_lines(figures: Figures, line: Callable[[str, Figures], str]) -> Iterator[str]:
    """A line per variant with its figures, or why there are none; and the ratio to the peers."""
    for name, variant in figures["variants"].items():
        yield f"  {name}: {variant['failed'] if 'failed' in variant else line(name, variant)}"
    if "ratio" in figures:
        yield f"  ratio {figures['ratio']:.2f} (above 1: ours is faster)"


def free_device() -> None:
    """Free the memory of the variant before, and its compiled code."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()


def ratio(variants: dict[str, Figures], figure: str) -> dict[str, float]:
    """The fastest of ours over the fastest of the peers', where both were measured."""
    measured = {name: variant[figure] for name, variant in variants.items() if figure in variant}
    ours = [rate for name, rate in measured.items() if name.startswith("ours")]
    peers = [rate for name, rate in measured.items() if not name.startswith("ours")]
    return {"ratio": round(max(ours) / max(peers), 2)} if ours and peers else {}


def require_finite(losses: list[float]) -> None:
    """Refuse the speed of a training that diverged."""
    if bad := [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]:
        raise ArithmeticError(f"the loss is not finite from step {bad[0]} on, so its speed means nothing")


def now() -> float:
    """Wall time after the device has finished its work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
