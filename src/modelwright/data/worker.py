"""A worker process of a preparation: reads pieces from its input, a line each, and answers when they are done."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from modelwright.data import steps
from modelwright.data.plan import Plan
from modelwright.errors import ModelwrightError, ProblemsFound


def attempt(plan: Plan, step: str, number: int) -> dict[str, Any]:
    """Do a piece; what goes wrong is told, not raised."""
    try:
        steps.do(plan, step, number)
    except ProblemsFound as error:
        problems = [(problem.where, problem.message) for problem in error.problems]
        return {"done": False, "kind": "DataError", "problems": problems}
    except ModelwrightError as error:
        return {"done": False, "kind": type(error).__name__, "message": str(error)}
    except Exception as error:
        message = f"{type(error).__name__}: {error} (step {step.partition('-')[0]}, piece {number})"
        return {"done": False, "kind": "", "message": message}
    return {"done": True}


def main() -> None:
    """Serve until the input ends, which it does when whoever asked is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    for line in sys.stdin:
        asked = json.loads(line)
        plan = Plan.read(Path(asked["folder"]))
        print(json.dumps(attempt(plan, asked["step"], asked["number"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
