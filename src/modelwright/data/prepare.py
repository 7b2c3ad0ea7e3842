"""Prepare raw text: clean, deduplicate, decontaminate, tokenize, pack; killed anywhere it goes on.

    for told in prepare(plan, Alone()):
        print(told)

The same input gives the same bytes, whoever does the work and however often it was stopped.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelwright import __version__
from modelwright.data import dedup, examination, fast, minhash, tokenizer
from modelwright.data.plan import Plan, finished
from modelwright.data.quarantine import QUARANTINE
from modelwright.data.shard_writer import Block, Documents, write_part
from modelwright.data.shards import MANIFEST, PARTS, Layout, seal
from modelwright.data.steps import EXACT, HELD_OUT, KEPT, NEAR, begins_of, signatures_of, texts_of, tokenizer_folder
from modelwright.data.summary import summary
from modelwright.data.work import put, put_facts
from modelwright.data.workers import Alone, Crew, Processes
from modelwright.errors import DataError, Problem
from modelwright.runs.folder import write_json

REPORT = "report.json"
FEW = 20_000
"""Documents below which comparing them takes less time than starting a process."""
SAMPLES = 256
"""Documents on which a faster tokenizer is held against the tokenizer itself."""


@dataclass(frozen=True)
class Told:
    """How far a preparation is."""

    step: str
    """What is being done."""
    done: int
    """Pieces that are done."""
    of: int
    """Pieces in all."""


def prepare(plan: Plan, crew: Crew) -> Iterator[Told]:
    """Do everything that is not done yet, and tell of each piece."""
    if finished(plan):
        crew.first(plan, lambda: False, lambda: _tidy(plan))
        return
    units, settings = list(range(len(plan.units))), plan.settings
    crew.first(plan, lambda: _planned(plan), lambda: _begin(plan))
    yield from _each(crew, plan, "clean", plan.clean, units)
    crew.first(plan, lambda: plan.work.done(f"first-{plan.clean}"), lambda: _find_exact(plan))
    if settings.near_dedup:
        few = len(plan.work.array(f"first-{plan.clean}", 0, "first")) < FEW and isinstance(crew, Processes)
        yield from _each(Alone() if few else crew, plan, "compare", plan.group, list(range(minhash.BANDS)))
    yield Told("decide", 0, 1)
    crew.first(plan, lambda: plan.work.done(plan.decide), lambda: _decide(plan))
    if plan.tokenizer is None:
        yield Told("train the tokenizer", 0, 1)
        crew.first(plan, lambda: plan.work.done(plan.train), lambda: _train(plan))
    crew.first(plan, lambda: plan.work.done(f"encoder-{plan.encode}"), lambda: _choose(plan))
    yield from _each(crew, plan, "tokenize", plan.encode, units)
    yield Told("pack", 0, 1)
    crew.first(plan, lambda: finished(plan), lambda: _pack(plan))
    yield Told("pack", 1, 1)


def _each(crew: Crew, plan: Plan, name: str, step: str, numbers: list[int]) -> Iterator[Told]:
    done = sum(plan.work.done(step, number) for number in numbers)
    yield Told(name, done, len(numbers))
    for _ in crew.do(plan, step, numbers):
        done = sum(plan.work.done(step, number) for number in numbers)
        yield Told(name, done, len(numbers))


def _planned(plan: Plan) -> bool:
    """Whether the plan that lies there is this one, with all that its workers need."""
    try:
        there = Plan.read(plan.folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    exam = not plan.settings.decontaminate or plan.work.done(f"exam-{plan.clean}")
    return there.config == plan.config and exam and plan.work.done(f"begun-{plan.config}")


def _begin(plan: Plan) -> None:
    """Write the plan down, and forget what an earlier wish left."""
    steps = (plan.clean, plan.group, plan.decide, plan.train, plan.encode)
    keep = {*steps, f"first-{plan.clean}", f"exam-{plan.clean}", f"encoder-{plan.encode}"}
    if plan.work.folder.is_dir():
        for path in plan.work.folder.iterdir():
            if path.is_dir() and path.name not in keep:
                shutil.rmtree(path)
    plan.write()
    if plan.settings.decontaminate:
        ngram = plan.settings.decontaminate_ngram
        examination.write(plan.work, plan.clean, plan.settings.decontaminate, ngram, plan.beside)
    with plan.work.making(f"begun-{plan.config}") as folder:
        put_facts(folder, {"units": len(plan.units)})


def _find_exact(plan: Plan) -> None:
    """The first document of each text; too many bad rows end everything here."""
    facts = [plan.work.facts(plan.clean, unit) for unit in range(len(plan.units))]
    rows, bad = (sum(fact[key] for fact in facts) for key in ("rows", "bad"))
    quarantined = list(_quarantine(plan))
    if rows and bad / rows > plan.settings.max_bad_share:
        _keep_quarantine(plan, quarantined)
        shown = [Problem(each["where"], each["reason"]) for each in quarantined[:10]]
        limit = f"prepare.max_bad_share {plan.settings.max_bad_share:g}"
        letter = f"{bad:,} of {rows:,} rows cannot be used, more than {limit} allows"
        raise DataError([*shown, Problem(str(plan.folder / QUARANTINE), f"{letter}; all of them are listed here")])
    if not sum(fact["documents"] for fact in facts):
        letter = "no document is left after cleaning; " + _most_dropped(facts)
        raise DataError([Problem(plan.data.source, letter)])
    hashes = np.concatenate([plan.work.array(plan.clean, unit, "hashes") for unit in range(len(plan.units))])
    first = dedup.first_of_each(hashes) if plan.settings.exact_dedup else np.arange(len(hashes))
    with plan.work.making(f"first-{plan.clean}") as folder:
        put(folder, "first", first)


def _most_dropped(facts: list[dict[str, Any]]) -> str:
    times: dict[str, int] = {}
    for fact in facts:
        for rule, told in fact["rules"].items():
            times[rule] = times.get(rule, 0) + told["documents"]
    rule = max(times, key=lambda name: times[name], default=None)
    return f"prepare.{rule} dropped {times[rule]:,}" if rule else "there was none to begin with"


def _quarantine(plan: Plan) -> Iterator[dict[str, Any]]:
    for unit in range(len(plan.units)):
        with (plan.work.piece(plan.clean, unit) / QUARANTINE).open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def _keep_quarantine(plan: Plan, rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (plan.folder / QUARANTINE).write_text(lines, encoding="utf-8")


def _decide(plan: Plan) -> None:
    """What becomes of each document: kept, held out, dropped as the same or nearly the same."""
    first = np.array(plan.work.array(f"first-{plan.clean}", 0, "first"))
    numbers = np.arange(len(first))
    decisions = np.where(first == numbers, KEPT, EXACT).astype(np.uint8)
    sizes: dict[int, int] = {}
    if plan.settings.near_dedup:
        edges = [np.array(plan.work.array(plan.group, band, "edges")) for band in range(minhash.BANDS)]
        lowest = dedup.clusters(len(first), np.unique(np.concatenate(edges), axis=0))
        lowest = dedup.refined(lowest, signatures_of(plan), plan.settings.near_dedup_threshold)
        decisions[(lowest != numbers) & (decisions == KEPT)] = NEAR
        sizes = dedup.sizes(lowest)
    begins = begins_of(plan)
    _hold_out(plan, decisions, begins)
    with plan.work.making(plan.decide) as folder:
        put(folder, "decisions", decisions)
        put(folder, "begins", begins)
        put_facts(folder, {"clusters": {str(size): times for size, times in sizes.items()}})


def _hold_out(plan: Plan, decisions: np.ndarray[Any, Any], begins: np.ndarray[Any, Any]) -> None:
    """Mark what is held out: the files that are, or the groups whose hash comes first."""
    if plan.data.validation_file:
        for unit, (start, stop) in enumerate(itertools.pairwise(begins)):
            if plan.units[unit].side == "held_out":
                mine = decisions[start:stop]
                mine[mine == KEPT] = HELD_OUT
        return
    groups = np.concatenate([plan.work.array(plan.clean, unit, "groups") for unit in range(len(plan.units))])
    distinct = np.unique(groups[decisions == KEPT])
    count = plan.data.test_size.of(len(distinct))
    if count >= len(distinct):
        letter = f"test_size holds out {count} of {len(distinct)} distinct groups, which leaves none to train on"
        raise DataError([Problem(plan.data.source, letter)])
    chosen = np.isin(groups, distinct[:count])  # sorted by hash, which is as good as drawn by lot
    decisions[chosen & (decisions == KEPT)] = HELD_OUT


def _train(plan: Plan) -> None:
    """Train a tokenizer on an even sample of what is trained on."""
    with plan.work.making(plan.train) as folder:
        size = tokenizer.train(_sample(plan), plan.settings.vocab_size, folder)
        put_facts(folder, {"vocab_size": size})


def _sample(plan: Plan) -> Iterator[str]:
    """Documents that are trained on, every n-th of them, as many megabytes as the recipe says."""
    facts = [plan.work.facts(plan.clean, unit) for unit in range(len(plan.units))]
    step = max(1, -(-sum(fact["bytes_out"] for fact in facts) // (plan.settings.tokenizer_sample_mb * 1_000_000)))
    decisions, begins = plan.work.array(plan.decide, 0, "decisions"), plan.work.array(plan.decide, 0, "begins")
    for unit in range(len(plan.units)):
        numbers = np.arange(begins[unit], begins[unit + 1])
        wanted = (decisions[begins[unit] : begins[unit + 1]] == KEPT) & (numbers % step == 0)
        for texts in texts_of(plan.work, plan.clean, unit, wanted):
            yield from texts


def _choose(plan: Plan) -> None:
    """Hold a faster tokenizer against the tokenizer on documents from everywhere."""
    decisions, begins = plan.work.array(plan.decide, 0, "decisions"), plan.work.array(plan.decide, 0, "begins")
    kept = np.flatnonzero(np.asarray(decisions) <= HELD_OUT)
    chosen = kept[np.unique(np.linspace(0, len(kept) - 1, SAMPLES).astype(np.int64))]
    samples: list[str] = []
    for unit in range(len(plan.units)):
        wanted = np.isin(np.arange(begins[unit], begins[unit + 1]), chosen)
        for texts in texts_of(plan.work, plan.clean, unit, wanted):
            samples += [text[:20_000] for text in texts]
    fast.choose(tokenizer_folder(plan), samples, plan.settings.fast_tokenizer, plan.work, plan.encode)


def _pack(plan: Plan) -> None:
    """Write the shards, the manifest and the report."""
    folder, settings = plan.folder, plan.settings
    (folder / MANIFEST).unlink(missing_ok=True)
    tokenizer_from = tokenizer_folder(plan)
    encoder = tokenizer.Encoder.open(tokenizer_from)
    layout = Layout(settings.row_length, encoder.vocab_size, settings.shard_rows)
    parts = {}
    for part in PARTS:
        names = dict.fromkeys(unit.source for unit in plan.units if unit.side == "split" or part == "held_out")
        parts[part] = write_part(folder, part, layout, {name: _blocks(plan, name, part) for name in names}, plan.config)
        _refuse_losses(plan, part, parts[part])
    tokenizer.copy(tokenizer_from, folder / "tokenizer")
    told = summary(plan, parts)
    write_json(folder / REPORT, told)
    _keep_quarantine(plan, list(_quarantine(plan)))
    facts = {"modelwright": __version__, "config": plan.config, "tokenizer": encoder.fingerprint,
             "sources": plan.fingerprint, "weights": plan.data.mix, "encoder": told["encoder"],
             "documents": told["documents"]}  # fmt: skip
    seal(folder, layout, parts, facts)
    _tidy(plan)


def _tidy(plan: Plan) -> None:
    """Take away what is needed no more; a kill may have left some of it."""
    if not plan.settings.keep_work:
        shutil.rmtree(plan.work.folder, ignore_errors=True)


def _blocks(plan: Plan, source: str, part: str) -> Iterator[Block]:
    for number, unit in enumerate(plan.units):
        if unit.source == source:
            facts = plan.work.facts(plan.encode, number)[part]
            yield Block(facts["tokens"], lambda number=number: _load(plan, number, part))  # type: ignore[misc]


def _load(plan: Plan, number: int, part: str) -> Documents:
    tokens, lengths, text_bytes = (plan.work.array(plan.encode, number, f"{part}.{name}")
                                   for name in ("tokens", "lengths", "bytes"))  # fmt: skip
    return Documents(tokens, np.asarray(lengths), np.asarray(text_bytes))


def _refuse_losses(plan: Plan, part: str, facts: dict[str, Any]) -> None:
    total, length = facts["tokens"] + facts["lost_tokens"], plan.settings.row_length
    if part == "train" and not facts["rows"]:
        letter = f"there are {total:,} tokens, too few for one row of {length}; lower prepare.row_length"
        raise DataError([Problem(plan.data.source, letter)])
    if part == "train" and facts["lost_tokens"] > plan.settings.max_lost_share * total:
        letter = f"{facts['lost_tokens']:,} of {total:,} tokens would be lost with the last row of {length}"
        wish = "lower prepare.row_length, or raise prepare.max_lost_share"
        raise DataError([Problem(plan.data.source, f"{letter}; {wish}")])
