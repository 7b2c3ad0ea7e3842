"""The pieces of a preparation that workers do: clean a unit, compare a band, tokenize a unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data import dedup, minhash, shingles
from modelwright.data.clean import Cleaned, Drop, clean, repeated_share
from modelwright.data.examination import Examination
from modelwright.data.fast import open_encoder
from modelwright.data.files import Fault, Row, columns_seen, text_of, utf8_size
from modelwright.data.plan import Plan
from modelwright.data.quarantine import QUARANTINE, line_of
from modelwright.data.shards import Layout
from modelwright.data.shingles import Array
from modelwright.data.work import Work, put, put_facts
from modelwright.errors import DataError, Problem

BATCH_BYTES = 4 << 20
"""Text held at once."""
EXAMPLES = 3
"""Documents shown for each rule."""
KEPT, HELD_OUT, EXACT, NEAR = range(4)
"""What becomes of a document."""


def do(plan: Plan, step: str, number: int) -> None:
    """Do one piece, unless it is done."""
    if plan.work.done(step, number):
        return
    deeds = {plan.clean: clean_unit, plan.group: group_band, plan.encode: encode_unit}
    with plan.work.making(step, number) as folder:
        deeds[step](plan, number, folder)


@dataclass
class _Tally:
    """What is counted while a unit is cleaned."""

    rows: int = 0
    bad: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    documents: int = 0
    lines_dropped: int = 0
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)

    def drop(self, where: str, text: str, drop: Drop) -> None:
        """Count a document that goes, and keep the first few as examples."""
        rule = self.rules.setdefault(drop.rule, {"documents": 0, "bytes": 0, "examples": []})
        rule["documents"] += 1
        rule["bytes"] += len(text.encode("utf-8", "replace"))
        if len(rule["examples"]) < EXAMPLES:
            rule["examples"].append({"where": where, "found": drop.found, "text": " ".join(text.split())[:120]})


@dataclass(frozen=True)
class _Document:
    where: str
    text: str
    group: str
    size: int = 0


def clean_unit(plan: Plan, number: int, folder: Path) -> None:
    """Clean the documents of a unit, and keep with each its hash, its signature and its bands."""
    import pyarrow
    import pyarrow.parquet

    tally, signed = _Tally(), _Signed()
    examination = Examination.read(plan.work, plan.clean) if plan.settings.decontaminate else None
    schema = pyarrow.schema([("where", pyarrow.string()), ("text", pyarrow.string())])
    with (
        pyarrow.parquet.ParquetWriter(folder / "documents.parquet", schema, compression="lz4") as writer,
        (folder / QUARANTINE).open("w", encoding="utf-8") as quarantine,
    ):
        for batch in _batches(_cleaned(plan, number, tally, quarantine)):
            kept = _sign(plan, batch, tally, signed, examination)
            columns = {"where": [each.where for each in kept], "text": [each.text for each in kept]}
            writer.write_table(pyarrow.table(columns, schema=schema))
    for name, array in signed.arrays().items():
        put(folder, name, array)
    put_facts(folder, vars(tally))


def _cleaned(plan: Plan, number: int, tally: _Tally, quarantine: Any) -> Iterator[_Document]:
    """Documents that pass the rules for one document alone; bad rows go to the quarantine."""
    for item in plan.units[number].rows(plan.data, plan.beside):
        tally.rows += 1
        row = _document(item, plan)
        if isinstance(row, Fault):
            if row.whole_file:
                raise DataError([Problem(row.where, row.reason)])
            tally.bad += 1
            quarantine.write(line_of(row))
            continue
        tally.bytes_in += row.size
        cleaned: Cleaned = clean(row.text, plan.settings)
        tally.lines_dropped += cleaned.lines_dropped
        if cleaned.drop:
            tally.drop(row.where, row.text, cleaned.drop)
        else:
            yield _Document(row.where, cleaned.text, row.group)


def _document(item: Row | Fault, plan: Plan) -> _Document | Fault:
    """The text of a row, or what is wrong with it."""
    if isinstance(item, Fault):
        return item
    text, split_by = text_of(item, plan.data.text_column), plan.data.split_by
    if isinstance(text, Fault):
        return text
    if split_by and split_by not in item.values:
        return Fault(item.where, f"there is no column {split_by!r}; {columns_seen(item)}")
    size = utf8_size(text)
    assert size is not None
    return _Document(item.where, text, str(item.values[split_by]) if split_by else "", size)


def _batches(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
    batch: list[_Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass
class _Signed:
    """Arrays that grow batch by batch."""

    hashes: list[Array] = field(default_factory=list)
    groups: list[Array] = field(default_factory=list)
    signatures: list[Array] = field(default_factory=list)

    def arrays(self) -> dict[str, Array]:
        """All of them, with the band keys beside."""
        signature = np.concatenate(self.signatures or [np.zeros((0, minhash.WIDTH), dtype=np.uint32)])
        return {
            "hashes": np.concatenate(self.hashes or [np.zeros((0, 2), dtype=np.uint64)]),
            "groups": np.concatenate(self.groups or [np.zeros(0, dtype=np.uint64)]),
            "signatures": signature,
            "bands": minhash.band_keys(signature),
        }


def _sign(
    plan: Plan, batch: list[_Document], tally: _Tally, signed: _Signed, examination: Examination | None
) -> list[_Document]:
    """Hash a batch, leave out what repeats itself or is asked in an examination, and keep the signatures."""
    texts = [each.text for each in batch]
    lots = list(shingles.words(texts))
    runs = shingles.joined([lot.shingles(minhash.SIZE) for lot in lots])
    repeated = repeated_share(runs)
    asked = examination.asks(lots) if examination else np.zeros(len(batch), dtype=np.bool_)
    limit = plan.settings.max_repeated_ngrams
    good = (repeated <= limit) & ~asked
    for place in np.flatnonzero(~good):
        ngram = plan.settings.decontaminate_ngram
        drop = Drop("decontaminate", f"a run of {ngram} words") if asked[place] else Drop(
            "max_repeated_ngrams", round(float(repeated[place]), 3))  # fmt: skip
        tally.drop(batch[place].where, batch[place].text, drop)
    kept = [batch[place] for place in np.flatnonzero(good)]
    device = plan.settings.signature_device
    signature = minhash.signatures_by(device, runs) if plan.settings.near_dedup else np.full(
        (len(batch), minhash.WIDTH), minhash.EMPTY)  # fmt: skip
    raw = [each.text.encode() for each in kept]
    digests = b"".join(xxhash.xxh3_128_digest(text) for text in raw)
    signed.hashes.append(np.frombuffer(digests, dtype="<u8").reshape(-1, 2))
    groups = [each.group.encode() if plan.data.split_by else text for each, text in zip(kept, raw, strict=True)]
    # chance of each group to be held out: the seed and the words decide, never the place
    signed.groups.append(np.array([xxhash.xxh3_64_intdigest(group, plan.seed) for group in groups], dtype=np.uint64))
    signed.signatures.append(signature[good])
    tally.documents += len(kept)
    tally.bytes_out += sum(map(len, raw))
    return kept


def group_band(plan: Plan, band: int, folder: Path) -> None:
    """Verified near-duplicates within one band."""
    keys = np.concatenate([plan.work.array(plan.clean, unit, "bands")[band] for unit in range(len(plan.units))])
    first = np.array(plan.work.array(f"first-{plan.clean}", 0, "first"))
    eligible = first == np.arange(len(first))
    edges = dedup.band_edges(keys, eligible, signatures_of(plan), plan.settings.near_dedup_threshold)
    put_edges(folder, edges)


def put_edges(folder: Path, edges: Array) -> None:
    """Write the pairs of a band, sorted: the same bytes however they were found."""
    put(folder, "edges", edges[np.lexsort((edges[:, 1], edges[:, 0]))])
    put_facts(folder, {"edges": len(edges)})


def begins_of(plan: Plan) -> Array:
    """Where the documents of each unit begin, and the end of the last: [units + 1] int64."""
    counts = [len(plan.work.array(plan.clean, unit, "hashes")) for unit in range(len(plan.units))]
    return np.cumsum([0, *counts])


def signatures_of(plan: Plan) -> dedup.Signatures:
    """Brings signatures by document number from the pieces on the disk."""
    stored = [plan.work.array(plan.clean, unit, "signatures") for unit in range(len(plan.units))]
    begins = begins_of(plan)

    def bring(documents: Array) -> Array:
        found = np.empty((len(documents), minhash.WIDTH), dtype=np.uint32)
        units = np.searchsorted(begins, documents, side="right") - 1
        for unit in np.unique(units):
            mine = units == unit
            found[mine] = stored[unit][documents[mine] - begins[unit]]
        return found

    return bring


def encode_unit(plan: Plan, number: int, folder: Path) -> None:
    """Tokenize the documents of a unit that were kept, each side by itself."""
    decisions = plan.work.array(plan.decide, 0, "decisions")
    begins = plan.work.array(plan.decide, 0, "begins")
    mine = np.array(decisions[begins[number] : begins[number + 1]])
    encoder = open_encoder(tokenizer_folder(plan), plan.work, plan.encode)
    dtype = Layout(1, encoder.vocab_size).dtype
    facts: dict[str, Any] = {}
    for side, decision in (("train", KEPT), ("held_out", HELD_OUT)):
        tokens, lengths, text_bytes = [], [], []
        for texts in texts_of(plan.work, plan.clean, number, mine == decision):
            made = encoder.encode(texts)
            tokens.append(made.tokens.astype(dtype))
            lengths.append(made.lengths)
            text_bytes.append(made.text_bytes)
        nothing = np.zeros(0, dtype=np.int64)
        put(folder, f"{side}.tokens", np.concatenate(tokens or [nothing.astype(dtype)]))
        put(folder, f"{side}.lengths", np.concatenate(lengths or [nothing]))
        put(folder, f"{side}.bytes", np.concatenate(text_bytes or [nothing]))
        facts[side] = {"tokens": int(sum(map(len, tokens))), "documents": int(sum(map(len, lengths)))}
    put_facts(folder, facts)


def tokenizer_folder(plan: Plan) -> Path:
    """Where the tokenizer lies: trained in the work folder, or as the plan names it."""
    return Path(plan.tokenizer) if plan.tokenizer else plan.work.piece(plan.train)


def texts_of(work: Work, step: str, number: int, wanted: Array) -> Iterator[list[str]]:
    """Texts of a cleaned unit, some megabytes at a time; wanted: [documents] bool."""
    import pyarrow.parquet

    start = 0
    with pyarrow.parquet.ParquetFile(work.piece(step, number) / "documents.parquet") as file:
        for group in range(file.metadata.num_row_groups):
            column = file.read_row_group(group, columns=["text"]).column("text")
            chosen = column.filter(wanted[start : start + len(column)])
            start += len(column)
            if len(chosen):
                yield chosen.to_pylist()
