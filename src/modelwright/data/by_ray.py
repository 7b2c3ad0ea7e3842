"""Prepare by Ray Data, on a cluster whose machines share a disk: units by its map, bands by its shuffle.

The result is the same to the last byte as that of one process: a piece does not depend on who does it, and the pairs
of a band are sorted before they are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data import dedup, steps
from modelwright.data.plan import Plan
from modelwright.data.shingles import Array
from modelwright.data.worker import attempt
from modelwright.data.workers import Alone, letter_of
from modelwright.errors import UsageError

Columns = dict[str, Array]


@dataclass(frozen=True)
class Ray(Alone):
    """A Ray cluster."""

    count: int | None = None
    """CPUs to ask for where no cluster is running yet."""

    def do(self, plan: Plan, step: str, numbers: Sequence[int]) -> Iterator[int]:
        left = [number for number in numbers if not plan.work.done(step, number)]
        if not left:
            return
        data = _ray_data(self.count)
        yield from (_bands(data, plan, left) if step == plan.group else _units(data, plan, step, left))


def _ray_data(count: int | None) -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        raise UsageError("Ray is not installed; pip install 'modelwright[ray]'") from None
    if not ray.is_initialized():
        ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data


def _units(data: Any, plan: Plan, step: str, left: list[int]) -> Iterator[int]:
    """A row for each unit, a block for each row: Ray gives them to whoever is free, and again where one is lost."""
    folder = str(plan.folder)
    rows = data.from_items([{"number": number} for number in left], override_num_blocks=len(left))
    done = rows.map(lambda row: {**row, "answer": json.dumps(attempt(Plan.read(Path(folder)), step, row["number"]))})
    for row in done.iter_rows():
        answer = json.loads(row["answer"])
        if not answer["done"]:
            raise letter_of(answer)
        yield int(row["number"])


def _bands(data: Any, plan: Plan, left: list[int]) -> Iterator[int]:
    """The shuffle: documents whose keys may be the same come together, and only there are they compared."""
    folder, parts = str(plan.folder), max(2, len(plan.units))
    units = [{"unit": unit} for unit in range(len(plan.units))]
    keys = data.from_items(units, override_num_blocks=len(units)).map_batches(
        lambda batch: keys_of(Plan.read(Path(folder)), batch["unit"].tolist(), left, parts), batch_format="numpy"
    )
    compared = keys.groupby("part").map_groups(
        lambda group: pairs_of(Plan.read(Path(folder)), group), batch_format="numpy"
    )
    found = [(batch["band"], np.stack([batch["first"], batch["second"]], axis=1))
             for batch in compared.iter_batches(batch_format="numpy")]  # fmt: skip
    for band in left:
        edges = [pairs[bands == band] for bands, pairs in found]
        with plan.work.making(plan.group, band) as piece:
            steps.put_edges(piece, np.concatenate([np.zeros((0, 2), dtype=np.int64), *edges]))
        yield band


def keys_of(plan: Plan, units: Sequence[int], bands: Sequence[int], parts: int) -> Columns:
    """The band keys of some units, a row for each document and band, with the part of the shuffle it goes to."""
    first, begins = np.asarray(plan.work.array(f"first-{plan.clean}", 0, "first")), steps.begins_of(plan)
    columns: dict[str, list[Array]] = {"part": [], "band": [], "key": [], "document": []}
    for unit in units:
        documents = np.arange(begins[unit], begins[unit + 1])
        stored = plan.work.array(plan.clean, unit, "bands")
        for band in bands:
            keys = np.asarray(stored[band])
            wanted = (keys != 0) & (first[documents] == documents)
            columns["key"].append(keys[wanted])
            columns["document"].append(documents[wanted])
            columns["band"].append(np.full(int(wanted.sum()), band))
            columns["part"].append((keys[wanted] % np.uint64(parts)).astype(np.int64))
    return {name: np.concatenate(values) for name, values in columns.items()}


def pairs_of(plan: Plan, group: Columns) -> Columns:
    """Verified pairs among the documents of one part, band by band."""
    threshold, signatures = plan.settings.near_dedup_threshold, steps.signatures_of(plan)
    found: dict[str, list[Array]] = {"band": [], "first": [], "second": []}
    for band in np.unique(group["band"]):
        mine = group["band"] == band
        pairs = dedup.pairs_in_buckets(group["document"][mine], group["key"][mine], signatures, threshold)
        found["band"].append(np.full(len(pairs), band))
        found["first"].append(pairs[:, 0])
        found["second"].append(pairs[:, 1])
    return {name: np.concatenate(values) for name, values in found.items()}
