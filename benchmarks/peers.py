"""What trainings that are measured beside each other share: the clock in the peer's trainer, and a clean device."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from benchmarks.kernels import Kernels
from modelwright.errors import UsageError

Figures = dict[str, Any]


class Named(Protocol):
    """A way to do the work."""

    @property
    def name(self) -> str:
        """What the table calls it."""


Way = TypeVar("Way", bound=Named)


def asked(ways: Sequence[Way], words: Sequence[str]) -> list[Way]:
    """Ways of which a word is the name or, where it is no way's name, a part; without words all but those aside."""
    names = [way.name for way in ways]
    if strange := [word for word in words if not any(word in name for name in names)]:
        raise UsageError(f"--way is {strange[0]!r}, which no way has in its name; there are: {' | '.join(names)}")
    if not words:
        return [way for way in ways if not getattr(way, "aside", False)]
    parts = [word for word in words if word not in names]
    return [way for way in ways if way.name in words or any(word in way.name for word in parts)]


def each(ways: Sequence[Way], kernels: bool, train: Callable[[Way, Kernels], Figures]) -> dict[str, Figures]:
    """The figures of each way in turn, told as they come; one that fails tells why and the others go on."""
    told: dict[str, Figures] = {}
    for way in ways:
        let_go()
        watch = Kernels(kernels)
        try:
            told[way.name] = train(way, watch)
        except Exception as error:  # one way must not take the others with it
            told[way.name] = {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        print("\n".join([f"{way.name} {told[way.name]}", *watch.lines()]), flush=True)
        if watch.table:
            told[way.name]["kernels"] = watch.table
    return told


def table(ways: dict[str, Figures], line: Callable[[str, Figures], str]) -> Iterator[str]:
    """A line for each way: its figures, or why there are none."""
    for name, way in ways.items():
        yield f"  {name}: {way['failed'] if 'failed' in way else line(name, way)}"


def let_go() -> None:
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


def finite(losses: list[float]) -> None:
    """Refuse the speed of a training that has learnt nothing."""
    if bad := [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]:
        raise ArithmeticError(f"the loss is no number from step {bad[0]} on; how fast that was says nothing")


def clock(marks: list[float], losses: list[float]) -> Any:
    """What writes down when a trainer of theirs ended each step, and the losses it tells."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(now())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    return Clock()


def now() -> float:
    """The time when the device has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
