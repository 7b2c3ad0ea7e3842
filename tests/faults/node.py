"""One node of a benchmark: `python -m tests.faults.node RECIPE ASKED`, a launch whose steps have a real length."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from modelwright.launch.config import NodeOptions, build_launch_config
from modelwright.launch.supervisor import supervise
from modelwright.recipe.load import load


def main() -> None:
    """Start this node and leave with its exit code."""
    recipe, asked = sys.argv[1], NodeOptions(**json.loads(sys.argv[2]))
    wish = build_launch_config(load(recipe), ("run", recipe, "--log-format", "plain"), asked, 3)
    code, letter = supervise(replace(wish, forkserver_preload=(*wish.forkserver_preload, "tests.faults.pace")))
    if letter:
        print(letter, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
