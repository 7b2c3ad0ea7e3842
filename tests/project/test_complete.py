"""What is built is also kept: no source file is hidden from git, so that a fresh clone has them all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_git_ignores_no_source_file() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    files = [
        str(file.relative_to(ROOT))
        for folder in ("src", "tests", "recipes", "docs", "benchmarks")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=ROOT,
        input="\n".join(files),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [], ".gitignore hides what a clone needs"
