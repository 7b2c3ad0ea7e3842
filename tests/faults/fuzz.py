"""Feed every reader with inputs that nobody meant: it may answer with a result or with a letter of ours, nothing else.

Inputs come from two sources, both decided by a seed: real files that are damaged at random (flipped, cut, spliced,
doubled, words of the format put anywhere), and values that hypothesis makes up in the shape that a reader expects.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelwright.errors import ModelwrightError
from tests.faults.fuzz_targets import Target, targets

MADE_UP = 5
"""One input in so many is made up by hypothesis, where it is installed; the others are damaged files."""
NUMBERS = (b"0", b"-1", b"1e999", b"-1e-999", b"NaN", b"9" * 20, b"9" * 5000, b"0x7f", b"1_0", b"1.5", b"true", b"null")
LETTERS = ("\x00", "\ufeff", "\u202e", "\u2028", "\U0001f525", "é", "\r", "\t", "\x1b[2J", "\\ud800", "\x7f", "\x85")


@dataclass
class Tally:
    """What came of the inputs to one reader."""

    inputs: int = 0
    """How many there were."""
    results: int = 0
    """Those that were read."""
    letters: int = 0
    """Those that were refused with a letter."""
    escaped: list[str] = field(default_factory=list)
    """What was neither: the error, and the input that caused it."""
    slowest: float = 0.0
    """CPU-seconds of the slowest one."""


def fuzz(target: Target, inputs: int, seed: int, folder: Path) -> Tally:
    """Give a reader so many inputs; the same seed gives the same ones."""
    tally = Tally()
    folder.mkdir(parents=True, exist_ok=True)
    made_up = inputs // MADE_UP if target.values is not None and has_hypothesis() else 0
    if made_up:
        _make_up(target, made_up, seed, lambda given: _try(target, given, folder, tally))
    for given in damaged(target, inputs - tally.inputs, seed):
        _try(target, given, folder, tally)
    return tally


def measure(folder: str, inputs: int, seed: int) -> None:
    """Give every reader its share of the inputs; fuzz.json tells what came of them."""
    weights = sum(target.weight for target in targets())
    readers = {}
    for target in targets():
        tally = fuzz(target, math.ceil(inputs * target.weight / weights), seed, Path(folder) / target.name)
        readers[target.name] = {**asdict(tally), "slowest": round(tally.slowest, 3)}
        print(f"{target.name}: {tally.inputs} inputs, {len(tally.escaped)} escapes", flush=True)
    whole = {
        "inputs": sum(each["inputs"] for each in readers.values()),
        "hypothesis": has_hypothesis(),
        "readers": readers,
    }
    (Path(folder) / "fuzz.json").write_text(json.dumps(whole), encoding="utf-8")


def has_hypothesis() -> bool:
    """Whether the library that makes up values is installed."""
    from importlib.util import find_spec

    return find_spec("hypothesis") is not None


def named(name: str) -> Target:
    """A reader by its name."""
    return next(target for target in targets() if target.name == name)


def damaged(target: Target, count: int, seed: int) -> Iterator[bytes]:
    """Real inputs, each damaged in one to five places."""
    draw = random.Random(f"{seed}:{target.name}")
    for _ in range(count):
        given = bytearray(draw.choice(target.seeds))
        for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
            _damage(given, target, draw)
        yield bytes(given) if target.mend is None else target.mend(bytes(given))


def _damage(given: bytearray, target: Target, draw: random.Random) -> None:
    """One change in place."""
    place = draw.randrange(len(given) + 1)
    length = draw.choice((1, 2, 8, 64, 512))
    kind = draw.randrange(9)
    if kind == 0 and given:
        given[place % len(given)] ^= 1 << draw.randrange(8)
    elif kind == 1 and given:
        given[place % len(given)] = draw.randrange(256)
    elif kind == 2:
        given[place:place] = draw.choice(target.words)
    elif kind == 3:
        given[place:place] = draw.choice(NUMBERS) if draw.random() < 0.5 else draw.choice(LETTERS).encode()
    elif kind == 4:
        del given[place : place + length]
    elif kind == 5:
        given[place:place] = given[place : place + length] * draw.choice((1, 2, 50))
    elif kind == 6:
        del given[place:]
    elif kind == 7:
        other = draw.choice(target.seeds)
        start = draw.randrange(len(other) + 1)
        given[place : place + length] = other[start : start + length]
    else:
        lines = bytes(given).split(b"\n")
        draw.shuffle(lines)
        given[:] = b"\n".join(lines)


def _make_up(target: Target, count: int, seed: int, give: Callable[[bytes], None]) -> None:
    """Values by hypothesis; what escapes is gathered, so nothing is shrunk and nothing kept."""
    import hypothesis

    assert target.values is not None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.values())
    def one(value: Any) -> None:
        give(target.write(value))

    one()


def _try(target: Target, given: bytes, folder: Path, tally: Tally) -> None:
    began = time.process_time()
    try:
        target.read(given, folder)
        tally.results += 1
    except ModelwrightError as error:
        tally.letters += 1
        str(error).encode()  # a letter that cannot be printed would be no letter
    except Exception as error:
        if len(tally.escaped) < 20:
            tally.escaped.append(f"{target.name}: {type(error).__name__}: {str(error)[:120]} from {_shown(given)}")
    tally.inputs += 1
    tally.slowest = max(tally.slowest, time.process_time() - began)


def _shown(given: bytes) -> str:
    return json.dumps(given[:300].decode("latin-1")) + (f" and {len(given) - 300} more bytes" if given[300:] else "")
