"""Real text for the data benches: what the packages of this machine say and do, with near-duplicates planted."""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LONGEST = 100_000
SHORTEST = 200
PLANTED = 0.05
"""Share of documents that come again with some words changed."""


def gather(megabytes: float, seed: int = 3) -> list[str]:
    """So many megabytes of documents, a file each, in the order of their paths; the planted ones stand at the end."""
    texts: list[str] = []
    size = 0
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")[:LONGEST]
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) < SHORTEST:
            continue
        texts.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            break
    chance = random.Random(seed)
    return texts + [_changed(text, chance) for text in chance.sample(texts, int(PLANTED * len(texts)))]


def _files() -> Iterator[Path]:
    places = dict.fromkeys(filter(None, (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), *sys.path)))
    seen: set[Path] = set()
    for folder in map(Path, places):
        if folder.name in ("site-packages", "dist-packages") or folder == Path(sysconfig.get_path("stdlib")):
            for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
                if path not in seen:
                    seen.add(path)
                    yield path


def _changed(text: str, chance: random.Random) -> str:
    words = text.split(" ")
    for _ in range(max(1, int(len(words) * chance.choice((0.005, 0.01, 0.02, 0.03, 0.05))))):
        words[chance.randrange(len(words))] = f"changed{chance.randrange(10_000)}"
    return " ".join(words)


def write_jsonl(texts: list[str], path: Path, megabytes: float) -> int:
    """Write documents again and again, each time a little otherwise, until the file is so large; returns the rows."""
    size = rows = turn = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for number, text in enumerate(texts):
                salted = text if turn == 0 else text.replace("e", f"e{turn}", 400 + number % 7)
                size += file.write(json.dumps({"text": salted}, ensure_ascii=False) + "\n")
                rows += 1
                if size >= megabytes * 1e6:
                    break
            turn += 1
    return rows
