"""Trace one SFT optimizer step, and the value of `learning_rate`, through the files and functions of the package.

    python tests/architecture/trace.py [--root CHECKOUT] [--packing] [--json]

A tiny SFT recipe is run for real. Counted are the package's files and functions that run inside the second optimizer
step (batch, forward, backward, update), and the files whose functions hold the learning rate on its way from the YAML
file to the optimizer. `--root` traces another checkout by the same rule.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

LEARNING_RATE = "0.00123457"
"""A value that nothing else has, so that it can be recognised wherever it is held."""


def package_file(frame: FrameType, package: str) -> str | None:
    """The file of a frame relative to the package, or None for other code."""
    name = frame.f_code.co_filename
    return name.removeprefix(package) if name.startswith(package) else None


class StepTracer:
    """Files and functions of the package that run while it is active."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.functions: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and (file := package_file(frame, self.package)):
            self.functions.add(
                (file, frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)
            )

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.functions})


class ValueTracer:
    """Files of the package whose functions hold the learning rate, as text or as a number, or name it and run."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.files: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "return" and (file := package_file(frame, self.package)):
            code = frame.f_code
            names_it = "learning_rate" in (*code.co_names, *code.co_varnames, *code.co_consts)
            if names_it or any(map(self.is_value, [*frame.f_locals.values(), arg])):
                self.files.setdefault(file, set()).add(frame.f_code.co_name)

    @staticmethod
    def is_value(value: Any) -> bool:
        return (type(value) is float and value == float(LEARNING_RATE)) or (
            type(value) is str and value == LEARNING_RATE
        )


def trace_run(root: Path, work_dir: Path, settings: dict[str, Any]) -> tuple[StepTracer, ValueTracer]:
    """Train three steps of a tiny SFT recipe under both tracers."""
    sys.path[:0] = [str(root / "src"), str(root / "tests")]
    import tiny
    from modelwright.cli import main as command

    try:
        from modelwright.engine import trainer
    except ImportError:  # the layout of 0.1
        from modelwright.engine import loop as trainer

    package = str(root / "src" / "modelwright") + "/"
    step_tracer, value_tracer = StepTracer(package), ValueTracer(package)
    original: Callable[..., Any] = trainer.Engine._step
    steps = 0

    def traced_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1  # from the first step on, the learning rate is in the optimizer: the value tracer stays off
        sys.setprofile(step_tracer if steps == 2 else None)
        try:
            return original(engine, *args, **kwargs)
        finally:
            sys.setprofile(None)

    trainer.Engine._step = traced_step
    model = tiny.tiny_model(work_dir / "model")
    recipe = work_dir / "trace.yaml"
    lines = [f"  {key}: {value}" for key, value in settings.items()]
    recipe.write_text(
        f"name: trace\nmodel:\n  model_name_or_path: {model}\ndata:\n  dataset_name: field-guide\n"
        f"  columns: {{question: prompt, answer: completion}}\noutput_dir: {work_dir}/run\n"
        f"sft:\n  learning_rate: {LEARNING_RATE}\n" + "\n".join(lines) + "\n",
        encoding="utf-8",
    )
    sys.setprofile(value_tracer)
    try:
        command.main(["run", str(recipe)])
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    return step_tracer, value_tracer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "max_length": 64,
        "packing": str(options.packing).lower(),
    }
    with tempfile.TemporaryDirectory() as folder:
        step, value = trace_run(options.root.resolve(), Path(folder), settings)
    if options.json:
        print(
            json.dumps(
                {
                    "step_files": step.files,
                    "step_functions": len(step.functions),
                    "learning_rate_files": sorted(value.files),
                }
            )
        )
        return
    print(f"one SFT step: {len(step.files)} files, {len(step.functions)} functions")
    for file in step.files:
        print(f"  {file}: {', '.join(sorted(name for at, name in step.functions if at == file))}")
    print(f"learning_rate: {len(value.files)} files")
    for file, names in sorted(value.files.items()):
        print(f"  {file}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
