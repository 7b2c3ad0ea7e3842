"""Run the commands of the lessons and compare their output with the pages.

A `bash` block is run as written; all blocks of all lessons run in order in one folder. `# exits 3` after a command
gives its exit code if that is not 0, and a block with `# needs FILE` is skipped if that file does not exist. A `text`
block directly below is the output:

- a line `…` stands for any number of lines, and `…` within a line for any text;
- the text of a model, after `before:` and `after:`, may differ;
- times, speeds and memory depend on the machine, and may differ;
- counts must be equal; other numbers may differ by 20 %;
- all other words must be the same.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/learn").glob("[0-9]*.md"))
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
HERE_DOCUMENT = re.compile(r"<<'?(?P<word>\w+)'?")
GAP = "…"
WIDTH = 116
"""Longer lines are truncated in a page."""
MAX_RELATIVE_ERROR = 0.2
TIME = r"(?:\d+ h \d+ min|\d+ min \d+ s|[\d.]+ s\b)"
PRECISION = r"(?:fp32|bf16|fp16), on \d+ CPU threads?"
MACHINE = rf"{TIME}|{PRECISION}|[\d,.]+ (?:tok/s|images/s|[KMG]i?B)|grad_norm [\d.e+-]+|#{{5,}}"
"""Values that depend on the machine; the gradient norm depends on its precision."""
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?"
PIECE = re.compile(rf"(?P<machine>{MACHINE})|(?P<number>(?<![\w.-]){NUMBER}(?![\w-]))|(?P<gap>{GAP})")
MODEL_TEXT = re.compile(r"^(?P<who>\s*(?:before|after):)(?: .*)?$")
KILLED = re.compile(r"^\S*block\.sh: line \d+: +\d+ (?:Killed|Terminated) .*$")
"""The message of bash about a killed job; an interactive shell prints another one."""


@dataclass(frozen=True)
class Block:
    """The commands of one block, and the output that the page shows."""

    line: int
    """Line of the page where it starts."""
    script: str
    """The commands."""
    shown: tuple[str, ...] | None
    """Lines of the output in the page; None if the page shows no output."""
    span: tuple[int, int]
    """Start and end of the output in the page, as character offsets."""

    @property
    def exit_codes(self) -> list[int]:
        """Exit codes other than 0 that the page gives, in order."""
        return [int(code) for code in re.findall(r"# exits (\d+)", self.script)]

    @property
    def needs(self) -> list[str]:
        """Files that may not exist on this machine."""
        return re.findall(r"^# needs (\S+)$", self.script, re.MULTILINE)


def blocks(text: str) -> Iterator[Block]:
    """The blocks of commands of a page, in order."""
    for match in BLOCK.finditer(text):
        if match["kind"] != "bash":
            continue
        after = BLOCK.match(text, match.end() + len("\n\n"))
        shows = after is not None and after["kind"] == "text"
        lines = tuple(after["body"].splitlines()) if after and shows else None
        span = after.span("body") if after and shows else (0, 0)
        yield Block(text[: match.start("body")].count("\n") + 1, match["body"], lines, span)


def statements(script: str) -> Iterator[str]:
    """The statements of a block, continued lines joined, without the text of here-documents."""
    lines = iter(script.replace("\\\n", " ").splitlines())
    for line in lines:
        yield line
        if opened := HERE_DOCUMENT.search(line):
            for inner in lines:
                if inner == opened["word"]:
                    break


def files(script: str) -> Iterator[tuple[str, str]]:
    """Name and content of each file that a block writes with `cat > NAME <<'EOF'`."""
    for match in re.finditer(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", script, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def commands(script: str) -> Iterator[list[str]]:
    """The arguments of each `modelwright` command of a block."""
    for statement in statements(script):
        words: list[str] = []
        reader = shlex.shlex(statement, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        for word in chain(reader, ";") if "modelwright" in statement else ():
            if not set(word) <= set("|&;()<>"):
                words.append(word)
            elif set(word) & set("<>"):  # a redirection
                words = words[:-1] if words[-1:] == ["2"] else words
                next(reader, None)
            else:
                while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("do", "then", "time")):
                    words.pop(0)
                if words[:1] == ["modelwright"]:
                    yield words[1:]
                words = []


class Shell:
    """A bash process for the blocks of a lesson; variables, jobs and the folder persist between blocks."""

    def __init__(self, folder: Path) -> None:
        tools = Path(tempfile.mkdtemp(prefix="lesson-"))
        for name, words in (("modelwright", "-m modelwright "), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n', encoding="utf-8")
            (tools / name).chmod(0o755)
        environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        environ |= {"COLUMNS": "120", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
        threads = os.environ.get("LESSONS_THREADS")  # on a busy machine one thread is faster than two
        environ = {**environ, "OMP_NUM_THREADS": threads or str(len(os.sched_getaffinity(0)))}
        self.folder, self.tools, self.seconds = folder, tools, 0.0
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder, env=environ, stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, script: str) -> tuple[list[str], list[int]]:
        """The output of a block, and the exit codes other than 0 of its commands."""
        source, out, codes, done = (self.tools / name for name in ("block.sh", "out", "codes", "done"))
        done.unlink(missing_ok=True)
        codes.write_text("", encoding="utf-8")
        source.write_text(f"{script}:\n", encoding="utf-8")  # ends with success, else the failure is recorded twice
        start = time.monotonic()
        trap = f"trap 'echo $? >> {codes}' ERR"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{trap}; . {source} > {out} 2>&1 < /dev/null; trap - ERR; echo > {done}\n")
        self.process.stdin.flush()
        while not done.exists():
            assert self.process.poll() is None, "the shell has ended"
            time.sleep(0.05)
        self.seconds += time.monotonic() - start
        lines = [line.rstrip() for line in out.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line and not KILLED.match(line)], [int(c) for c in codes.read_text().split()]

    def close(self) -> None:
        """End the shell and its background jobs."""
        assert self.process.stdin is not None
        self.process.stdin.write("kill $(jobs -p) 2> /dev/null; exit\n")
        self.process.stdin.close()
        self.process.wait(60)
        shutil.rmtree(self.tools, ignore_errors=True)


def match_output(shown: Sequence[str], printed: Sequence[str]) -> list[str | None]:
    """The printed line for each shown line, None for a gap; raises AssertionError if they differ."""
    runs: list[list[str]] = [[]]
    for line in (line for line in shown if line.strip()):
        if line.strip() == GAP:
            runs.append([])
        else:
            runs[-1].append(line)
    position, matched = 0, list[str | None]()
    for number, run in enumerate(runs):
        fixed, last = number == 0, number == len(runs) - 1
        start = len(printed) - len(run) if last and not fixed else position
        candidates = [start] if fixed or last else range(position, len(printed) - len(run) + 1)
        fit = next((at for at in candidates if at >= position and _fits(run, printed[at : at + len(run)])), None)
        if fit is None or (fixed and last and len(printed) != len(run)):
            raise AssertionError(_difference(run, printed[start if last else position :]))
        matched += ([None] if number else []) + list(printed[fit : fit + len(run)])
        position = fit + len(run)
    return matched


def _fits(shown: Sequence[str], printed: Sequence[str]) -> bool:
    return len(shown) == len(printed) and all(line_matches(a, b) for a, b in zip(shown, printed, strict=True))


def _difference(run: Sequence[str], printed: Sequence[str]) -> str:
    first = next(
        (f"{a!r}\n  is now {b!r}" for a, b in zip(run, printed, strict=False) if not line_matches(a, b)), "the end"
    )
    return "\n".join([f"the page shows {first}", "printed:", *(f"  {line}" for line in printed[:60])])


def line_matches(shown: str, printed: str) -> bool:
    """Whether a printed line matches a shown one."""
    if (words := MODEL_TEXT.match(shown)) and (others := MODEL_TEXT.match(printed)):
        return words["who"] == others["who"]
    match = _pattern(shown).fullmatch(printed)
    if match is None:
        return False
    numbers = [piece["number"] for piece in PIECE.finditer(shown) if piece["number"]]
    return all(numbers_match(a, b) for a, b in zip(numbers, match.groups(), strict=True))


def _pattern(shown: str) -> re.Pattern[str]:
    pattern, end = "", 0
    for piece in PIECE.finditer(shown):
        literal = re.sub(r"(?:\\ )+", r"\\s+", re.escape(shown[end : piece.start()]))  # columns move with their widths
        pattern += literal + (rf"({NUMBER})" if piece["number"] else ".*" if piece["gap"] else f"(?:{MACHINE})")
        end = piece.end()
    return re.compile(pattern + re.sub(r"(?:\\ )+", r"\\s+", re.escape(shown[end:])))


def numbers_match(shown: str, printed: str) -> bool:
    """Whether two numbers match: counts must be equal, measurements within 20 %."""
    a, b = (float(text.replace(",", "").rstrip("%")) for text in (shown, printed))
    if re.fullmatch(r"\d[\d,]*", shown) and re.fullmatch(r"\d[\d,]*", printed):
        return a == b
    tolerance = 10.0 if shown.endswith("%") else 0.05
    return abs(a - b) <= max(MAX_RELATIVE_ERROR * abs(a), tolerance)


def updated_output(block: Block, printed: Sequence[str]) -> str:
    """The text block with the current numbers, or the whole output if the words have changed."""
    assert block.shown is not None
    try:
        matched = iter(match_output(block.shown, printed))
    except AssertionError:
        return "".join(f"{_truncate(line)}\n" for line in printed)
    return "".join(f"{_updated_line(line, next(matched)) if line.strip() else ''}\n" for line in block.shown)


def _updated_line(shown: str, printed: str | None) -> str:
    """A line with the current numbers; omitted text stays omitted."""
    omitted = GAP in shown.removesuffix(GAP) or (shown.endswith(GAP) and printed == _truncate(printed or ""))
    return shown if printed is None or omitted else _truncate(printed)


def _truncate(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH].rpartition(' ')[0]} {GAP}"
