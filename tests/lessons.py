"""Lessons are pages that run: their commands, what they print, and how the one is held against the other.

A `bash` block is typed as it stands, all blocks of all lessons one after the other in one folder. `# exits 3` after a
command says how it ends when that is not 0, and a block with `# needs FILE` is left out where that file is not there. A
`text` block right below is what was printed:

- a line `…` stands for any number of lines, and `…` within a line for anything;
- a model's own words, after `before:` and `after:`, may differ;
- times, speeds and memory are the machine's, and may differ;
- counts must be equal; other numbers may be off by a fifth;
- every other word must be the same.
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
"""Longer lines are cut in a page."""
OFF_BY = 0.2
TIME = r"(?:\d+ h \d+ min|\d+ min \d+ s|[\d.]+ s\b)"
PRECISION = r"(?:fp32|bf16|fp16), on \d+ CPU threads?"
MACHINE = rf"{TIME}|{PRECISION}|[\d,.]+ (?:tok/s|images/s|[KMG]i?B)|grad [\d.e+-]+|#{{5,}}"
"""What differs from one machine to the next; a gradient's length does where the arithmetic is another."""
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?"
PIECE = re.compile(rf"(?P<machine>{MACHINE})|(?P<number>(?<![\w.-]){NUMBER}(?![\w-]))|(?P<gap>{GAP})")
WORDS_OF_A_MODEL = re.compile(r"^(?P<who>\s*(?:before|after):)(?: .*)?$")
KILLED = re.compile(r"^\S*block\.sh: line \d+: +\d+ (?:Killed|Terminated) .*$")
"""What a shell says of a job that was killed; one that a person types in says it otherwise."""


@dataclass(frozen=True)
class Block:
    """What is typed at once, and what the page shows of its output."""

    line: int
    """Line of the page where it begins."""
    script: str
    """What is typed."""
    shown: tuple[str, ...] | None
    """What the page shows; None where it shows nothing."""
    span: tuple[int, int]
    """Where that stands in the page."""

    @property
    def endings(self) -> list[int]:
        """Exit codes other than 0 that the page announces, in order."""
        return [int(code) for code in re.findall(r"# exits (\d+)", self.script)]

    @property
    def needs(self) -> list[str]:
        """Files that not everybody has."""
        return re.findall(r"^# needs (\S+)$", self.script, re.MULTILINE)


def blocks(text: str) -> Iterator[Block]:
    """What a page tells a person to type, in order."""
    for found in BLOCK.finditer(text):
        if found["kind"] != "bash":
            continue
        after = BLOCK.match(text, found.end() + len("\n\n"))
        shows = after is not None and after["kind"] == "text"
        lines = tuple(after["body"].splitlines()) if after and shows else None
        span = after.span("body") if after and shows else (0, 0)
        yield Block(text[: found.start("body")].count("\n") + 1, found["body"], lines, span)


def statements(script: str) -> Iterator[str]:
    """The commands of a block, long ones on one line, without the text of here-documents."""
    lines = iter(script.replace("\\\n", " ").splitlines())
    for line in lines:
        yield line
        if opened := HERE_DOCUMENT.search(line):
            for inner in lines:
                if inner == opened["word"]:
                    break


def files(script: str) -> Iterator[tuple[str, str]]:
    """The files that a block writes out by `cat > NAME <<'EOF'`."""
    for found in re.finditer(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", script, re.MULTILINE | re.DOTALL):
        yield found[1], found[2]


def commands(script: str) -> Iterator[list[str]]:
    """The words after `modelwright`, for each such command of a block."""
    for statement in statements(script):
        words: list[str] = []
        reader = shlex.shlex(statement, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        for word in chain(reader, ";") if "modelwright" in statement else ():
            if not set(word) <= set("|&;()<>"):
                words.append(word)
            elif set(word) & set("<>"):  # where its output goes
                words = words[:-1] if words[-1:] == ["2"] else words
                next(reader, None)
            else:
                while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("do", "then", "time")):
                    words.pop(0)
                if words[:1] == ["modelwright"]:
                    yield words[1:]
                words = []


class Shell:
    """A bash that a lesson is typed into: variables, jobs and the folder stay from block to block."""

    def __init__(self, folder: Path) -> None:
        tools = Path(tempfile.mkdtemp(prefix="lesson-"))
        for name, words in (("modelwright", "-m modelwright "), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n', encoding="utf-8")
            (tools / name).chmod(0o755)
        environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
        environ |= {"COLUMNS": "120", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
        threads = os.environ.get("LESSONS_THREADS")  # on a busy machine one thread does more than two
        environ = {**environ, "OMP_NUM_THREADS": threads or str(len(os.sched_getaffinity(0)))}
        self.folder, self.tools, self.seconds = folder, tools, 0.0
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder, env=environ, stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def type(self, script: str) -> tuple[list[str], list[int]]:
        """What a block prints, and the exit codes other than 0 of its commands."""
        source, out, codes, done = (self.tools / name for name in ("block.sh", "out", "codes", "done"))
        done.unlink(missing_ok=True)
        codes.write_text("", encoding="utf-8")
        source.write_text(f"{script}:\n", encoding="utf-8")  # the last word is no failure, else it would be told twice
        begun = time.monotonic()
        trap = f"trap 'echo $? >> {codes}' ERR"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{trap}; . {source} > {out} 2>&1 < /dev/null; trap - ERR; echo > {done}\n")
        self.process.stdin.flush()
        while not done.exists():
            assert self.process.poll() is None, "the shell has ended"
            time.sleep(0.05)
        self.seconds += time.monotonic() - begun
        lines = [line.rstrip() for line in out.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line and not KILLED.match(line)], [int(c) for c in codes.read_text().split()]

    def close(self) -> None:
        """End the shell; what it left running ends with it."""
        assert self.process.stdin is not None
        self.process.stdin.write("kill $(jobs -p) 2> /dev/null; exit\n")
        self.process.stdin.close()
        self.process.wait(60)
        shutil.rmtree(self.tools, ignore_errors=True)


def hold(shown: Sequence[str], printed: Sequence[str]) -> list[str | None]:
    """For each shown line the printed one that it is, None for a gap; raises where they differ."""
    runs: list[list[str]] = [[]]
    for line in (line for line in shown if line.strip()):
        if line.strip() == GAP:
            runs.append([])
        else:
            runs[-1].append(line)
    place, found = 0, list[str | None]()
    for number, run in enumerate(runs):
        fixed, last = number == 0, number == len(runs) - 1
        start = len(printed) - len(run) if last and not fixed else place
        tried = [start] if fixed or last else range(place, len(printed) - len(run) + 1)
        fit = next((at for at in tried if at >= place and _fits(run, printed[at : at + len(run)])), None)
        if fit is None or (fixed and last and len(printed) != len(run)):
            raise AssertionError(_difference(run, printed[start if last else place :]))
        found += ([None] if number else []) + list(printed[fit : fit + len(run)])
        place = fit + len(run)
    return found


def _fits(shown: Sequence[str], printed: Sequence[str]) -> bool:
    return len(shown) == len(printed) and all(same(a, b) for a, b in zip(shown, printed, strict=True))


def _difference(run: Sequence[str], printed: Sequence[str]) -> str:
    first = next((f"{a!r}\n  is now {b!r}" for a, b in zip(run, printed, strict=False) if not same(a, b)), "the end")
    return "\n".join([f"the page shows {first}", "printed:", *(f"  {line}" for line in printed[:60])])


def same(shown: str, printed: str) -> bool:
    """Whether a printed line is the one that a page shows."""
    if (words := WORDS_OF_A_MODEL.match(shown)) and (others := WORDS_OF_A_MODEL.match(printed)):
        return words["who"] == others["who"]
    found = _pattern(shown).fullmatch(printed)
    if found is None:
        return False
    numbers = [piece["number"] for piece in PIECE.finditer(shown) if piece["number"]]
    return all(near(a, b) for a, b in zip(numbers, found.groups(), strict=True))


def _pattern(shown: str) -> re.Pattern[str]:
    pattern, end = "", 0
    for piece in PIECE.finditer(shown):
        literal = re.sub(r"(?:\\ )+", r"\\s+", re.escape(shown[end : piece.start()]))  # columns move with their widths
        pattern += literal + (rf"({NUMBER})" if piece["number"] else ".*" if piece["gap"] else f"(?:{MACHINE})")
        end = piece.end()
    return re.compile(pattern + re.sub(r"(?:\\ )+", r"\\s+", re.escape(shown[end:])))


def near(shown: str, printed: str) -> bool:
    """Whether two numbers are the same for a reader: counts are equal, measures within a fifth."""
    a, b = (float(text.replace(",", "").rstrip("%")) for text in (shown, printed))
    if re.fullmatch(r"\d[\d,]*", shown) and re.fullmatch(r"\d[\d,]*", printed):
        return a == b
    slack = 10.0 if shown.endswith("%") else 0.05
    return abs(a - b) <= max(OFF_BY * abs(a), slack)


def refreshed(block: Block, printed: Sequence[str]) -> str:
    """The text block anew: the same lines with the numbers of now, or all of them where the words have changed."""
    assert block.shown is not None
    try:
        held = iter(hold(block.shown, printed))
    except AssertionError:
        return "".join(f"{_cut(line)}\n" for line in printed)
    return "".join(f"{_renewed(line, next(held)) if line.strip() else ''}\n" for line in block.shown)


def _renewed(shown: str, printed: str | None) -> str:
    """A line with the numbers of now; what the page leaves out stays out."""
    left_out = GAP in shown.removesuffix(GAP) or (shown.endswith(GAP) and printed == _cut(printed or ""))
    return shown if printed is None or left_out else _cut(printed)


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH].rpartition(' ')[0]} {GAP}"
