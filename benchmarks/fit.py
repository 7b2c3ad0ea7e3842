"""Fit the planner's coefficients to measured runs, and tell how well it foresees a run that it was not fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from benchmarks.judge import Run, judge, run_work
from modelwright.plan.calibration import CPU_MEMORY, Calibration
from modelwright.plan.gpus import Gpu
from modelwright.plan.memory import Fitted, memory
from modelwright.plan.time import Pace, step_time

Coefficients = TypeVar("Coefficients", Pace, Fitted)
Vector = np.ndarray[Any, np.dtype[np.float64]]
TURNS = 40
WORST = 0.05
"""An error above this counts by its fourth power rather than its second: no run may be sacrificed to the others."""
HOLD = 0.15
"""Of leaving a guess by a factor of e, the price in errors: what no run speaks of stays where it was."""


def fit(runs: Sequence[Run], gpu: Gpu, before: Calibration) -> Calibration:
    """The coefficients that bring predictions nearest to the runs."""
    works = [run_work(run, gpu) for run in runs]
    rates, peaks = [run["tokens_per_second"] for run in runs], [run["peak_bytes"] for run in runs]

    def slow(pace: Pace) -> list[float]:
        return [math.log(step_time(work, gpu, pace).rate / rate) for work, rate in zip(works, rates, strict=True)]

    def full(fitted: Fitted) -> list[float]:
        return [math.log(memory(work, fitted).total / peak) for work, peak in zip(works, peaks, strict=True)]

    guess = Fitted() if gpu.name != "CPU" else CPU_MEMORY
    pace = min((_nearest(start, Pace(), slow) for start in (before.pace, Pace())), key=lambda found: found[1])[0]
    found = Calibration(gpu.name, pace, _nearest(before.memory, guess, full)[0], runs=len(runs))
    judged = judge(runs, gpu, found)
    return replace(
        found,
        spread=max(abs(run["rate_error"]) for run in judged),
        memory_spread=max(abs(run["memory_error"]) for run in judged),
    )


def left_out(runs: Sequence[Run], seen: Sequence[Run], gpu: Gpu, fitted: Calibration) -> list[Run]:
    """Each run judged by coefficients fitted to what was seen of other settings; `fitted` are those of all seen."""
    found = []
    for run in runs:
        others = [other for other in seen if other["setting"]["name"] != run["setting"]["name"]]
        found += judge([run], gpu, fit(others, gpu, fitted) if 0 < len(others) < len(seen) else fitted)
    return found


def _nearest(
    start: Coefficients, guess: Coefficients, errors: Callable[[Coefficients], list[float]]
) -> tuple[Coefficients, float]:
    """Least squares over the logarithms of the coefficients, by damped Gauss-Newton steps; with the price that is left.

    A step waits for the device or for the host, and so there are several valleys: where it ends depends on the start.
    """
    names = [field.name for field in fields(guess)]
    anchor = np.array([math.log(getattr(guess, name)) for name in names])
    place = np.array([math.log(getattr(start, name)) for name in names])
    hold, damping = HOLD**2, 1e-3

    def made(where: Vector) -> Coefficients:
        return replace(guess, **{name: math.exp(value) for name, value in zip(names, where, strict=True)})

    def off(where: Vector) -> Vector:
        return np.array(errors(made(where)))

    def price(error: Vector, where: Vector) -> float:
        return float((error**2 / 2 + error**4 / (4 * WORST**2)).sum() + hold * ((where - anchor) ** 2).sum() / 2)

    now = off(place)
    for _ in range(TURNS):
        slopes = np.stack([(off(place + 1e-4 * one) - now) / 1e-4 for one in np.eye(len(names))], axis=1)
        weight = 1 + (now / WORST) ** 2
        curve = (slopes.T * weight) @ slopes + hold * np.eye(len(names))
        downhill = -(slopes.T @ (weight * now) + hold * (place - anchor))
        while damping < 1e6:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), downhill).clip(-0.7, 0.7)
            then = off(place + step)
            if price(then, place + step) < price(now, place):
                break
            damping *= 4
        else:
            break
        small = float(np.abs(step).max()) < 1e-4
        place, now, damping = place + step, then, max(damping / 5, 1e-6)
        if small:
            break
    return made(place), price(now, place)
