"""The formats of training rows: how each is read, measured for a plan, audited, shown and exported; needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from modelwright.data import chat, images, preferences, readers, sources
from modelwright.data.chat import Conversation, RowParser
from modelwright.data.chat_tokens import TokenizedRow, tokenize_conversation
from modelwright.data.packing import NDArray, pack_bfd
from modelwright.data.preferences import PreferencePair
from modelwright.data.recognize import Message, RowError, message_text, recognize
from modelwright.data.shards import Document, PackedDataset, check_raw_text, rows_to_documents
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.errors import DataError, UsageError
from modelwright.recipe.schema import Recipe
from modelwright.recipe.sections import CountOrFraction, DataConfig
from modelwright.recipe.stage_specs import ChatConfig, ReuseConfig, RowFormatName, RowStats, TrainingConfig

LENGTH_BINS = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 62]
"""Edges of the length histogram, in tokens."""


def length_histogram(lengths: NDArray) -> dict[str, Any]:
    """Histogram and percentiles of document lengths, in tokens."""
    counts, _ = np.histogram(lengths, bins=LENGTH_BINS)
    percentiles = np.percentile(lengths, [50, 90, 99]) if len(lengths) else [0, 0, 0]
    return {
        "bins": LENGTH_BINS[:-1],
        "counts": [int(count) for count in counts],
        **{name: int(value) for name, value in zip(("median", "p90", "p99"), percentiles, strict=True)},
        "longest": int(lengths.max()) if len(lengths) else 0,
    }


MANY_TRUNCATED = 0.2
"""Fraction of truncated rows above which a longer max_length is advised."""


def truncation_advice(rows: int, truncated: int, tokens: int, longest: int, is_estimate: bool = False) -> str:
    """What to change where max_length cuts many rows: `truncated` of them, by `tokens` in all; else nothing."""
    if truncated <= MANY_TRUNCATED * rows:
        return ""
    about = "about " * is_estimate
    lost = f"cuts {about}{truncated / rows:.0%} of the rows, which lose {tokens // truncated} tokens each"
    return f"{lost}; raise it: the longest row has {about}{longest} tokens"


CHARS_PER_TOKEN = 4.4
"""Characters of English prose per token, measured with vocabularies of 49k to 128k tokens."""
REFERENCE_VOCAB_SIZE = 49_152
"""The smallest of those vocabularies; tokens of a smaller one are shorter by the ratio of the logarithms."""
SAMPLE_ROWS = 200
"""Messages tokenized to measure the characters per token."""
TEMPLATE_TOKENS = 5
"""Tokens that a chat template adds per message."""
TEMPLATE_KEYS = ("tool_calls", "reasoning_content")
"""What a message may have besides role and content."""
MAX_PLAN_READ_BYTES = 64 << 20
"""Larger files are not read for a plan, so that planning stays fast."""
CIFAR10_TRAIN_ROWS = 50_000
CIFAR10_ROW_BYTES = 32 * 32 * 3


def estimate_row_stats(recipe: Recipe, stage: str, recipe_dir: Path, tokenizer: Path | None = None) -> RowStats:
    """Estimate from the rows of a stage if they are local and small; else assume rows of max_length.

    With the folder of a tokenizer, characters per token are measured; else they are estimated from the vocabulary size.
    """
    settings: Any = recipe.stages[stage]
    data, row_format = recipe.data_for(stage), ROW_FORMATS[settings.spec.row_format]
    if settings.spec.modality == "image":
        return _image_stats(data)
    max_length = settings.max_length
    if row_format.is_packed:
        return RowStats(None, max_length, float(max_length), 1.0, f"rows filled to {max_length} tokens")
    name, paths = data.source, [sources.local_path(part.source, recipe_dir) for part in data.parts.values()]
    unknown = RowStats(None, max_length, float(max_length), 1.0, f"{name} was not read; rows of max_length are taken")
    too_large = any(path and path.is_file() and path.stat().st_size > MAX_PLAN_READ_BYTES for path in paths)
    if too_large or any(sources.is_hub_name(part.source, recipe_dir) for part in data.parts.values()):
        return unknown
    if not sources.is_embedded(name) and not sources.source_files(name, recipe_dir):
        return replace(unknown, basis=f"there is no {name} yet; rows of max_length are taken")
    try:
        rows = row_format.load(data, recipe.seed, recipe_dir).train
    except (DataError, UsageError):
        return unknown
    texts = [[getattr(row, column) for column in row_format.columns] for row in rows]
    sample = [message for row in texts[:SAMPLE_ROWS] for messages in row for message in messages]
    count = partial(_estimate_tokens, chars_per_token=_chars_per_token(recipe, sample, tokenizer))
    lengths = [sum(map(count, row)) for row in texts]
    answers = sum(count(messages) for row in rows for messages in row_format.answers(row))
    is_chat = isinstance(settings, ChatConfig)
    trains_prompts = settings.spec.loss_on_prompt or (is_chat and not settings.assistant_only_loss)
    trained_fraction = 1.0 if trains_prompts else answers / max(1, sum(lengths))
    truncated_lengths = [min(length, max_length) for length in lengths]
    basis = f"{len(lengths):,} rows of {name}, tokens counted by their characters"
    if is_chat and settings.packing:
        packed = len(pack_bfd(truncated_lengths, max_length))
        return RowStats(packed, max_length, sum(truncated_lengths) / packed, trained_fraction, f"{basis}, packed")
    lengths, prefix_length = truncated_lengths, 0
    if isinstance(settings, ReuseConfig) and settings.share_prefix and not trains_prompts:
        prefix_length = _shared_prefix([messages for [messages] in texts], count)
    stats = RowStats(len(lengths), max(lengths), mean(lengths), trained_fraction, basis, lengths=tuple(lengths))
    return replace(stats, prefix_length=min(prefix_length, min(lengths)))


def _shared_prefix(conversations: Sequence[Sequence[Message]], count: Callable[[Sequence[Message]], int]) -> int:
    """Tokens of the system message that all conversations begin with; 0 if there is none."""
    first = conversations[0][:1]
    is_shared = [message["role"] for message in first] == ["system"] and all(
        each[:1] == first for each in conversations
    )
    return count(first) if is_shared else 0


def estimate_truncation(recipe: Recipe, stage: str, dataset: Any, tokenizer: Path | None = None) -> str:
    """`truncation_advice` before a run, with tokens counted as by `estimate_row_stats`."""
    settings: Any = recipe.stages[stage]
    row_format, rows = ROW_FORMATS[settings.spec.row_format], [*dataset.train, *dataset.held_out]
    is_split = isinstance(settings, ChatConfig) and settings.packing and settings.packing_strategy == "bfd_split"
    if is_split or row_format.audit_item is None or not row_format.columns:
        return ""
    items = [row_format.audit_item(row) for row in rows]
    if all(len(item.text) <= settings.max_length // 2 for item in items):
        return ""  # without reading the tokenizer, which takes 0.2 s
    sample = [message for row in rows[:SAMPLE_ROWS] for name in row_format.columns for message in getattr(row, name)]
    chars_per_token = _chars_per_token(recipe, sample, tokenizer)
    lengths = [round(len(item.text) / chars_per_token) + TEMPLATE_TOKENS * item.num_messages for item in items]
    excess = [length - settings.max_length for length in lengths if length > settings.max_length]
    return truncation_advice(len(rows), len(excess), sum(excess), max(lengths), is_estimate=True)


def require_data_files(recipe: Recipe, stage: str, recipe_dir: Path) -> None:
    """Refuse files of rows and images that do not exist; a folder of rows may be filled later."""
    data = recipe.data_for(stage)
    if recipe.stages[stage].spec.modality == "image" and data.data_dir is not None:
        images.find_images(data.source, recipe_dir, data.data_dir)
    is_file = data.train_file is not None or bool(readers.row_suffix(Path(data.source)))
    files = [data.source] if is_file and not data.mix else []
    for name in [*files, data.validation_file]:
        if name and not sources.source_files(name, recipe_dir):
            hint = sources.did_you_mean(name, recipe_dir, ())
            raise UsageError(f"{stage}: there is no file {name!r}{hint}")


def _image_stats(data: DataConfig) -> RowStats:
    name = data.source
    known = {"CIFAR-10": CIFAR10_TRAIN_ROWS} if "cifar10" in name.lower().replace("-", "") else {}
    known = {images.SHAPES_NAME: images.SHAPES_TRAIN} if name == images.SHAPES_NAME else known
    basis, rows = next(iter(known.items()), (f"images of {name}, not counted", None))
    rows = data.max_rows or rows
    return RowStats(rows, 1, 1.0, 1.0, basis, (rows or CIFAR10_TRAIN_ROWS) * 6 // 5 * CIFAR10_ROW_BYTES)


def _chars_per_token(recipe: Recipe, sample: Sequence[Message], tokenizer: Path | None) -> float:
    """Characters per token of these messages."""
    prepare = recipe.prepare
    if tokenizer is not None:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        texts = [message_text(message) for message in sample]
        tokens = sum(len(encoding.ids) for encoding in encoder.encode_batch(texts, add_special_tokens=False))
        return sum(map(len, texts)) / max(1, tokens)
    if prepare is not None and prepare.tokenizer == "train":
        return CHARS_PER_TOKEN * min(1.0, log(prepare.vocab_size) / log(REFERENCE_VOCAB_SIZE))
    return CHARS_PER_TOKEN


def _estimate_tokens(messages: Sequence[Message], chars_per_token: float) -> int:
    return round(sum(len(message_text(message)) / chars_per_token + TEMPLATE_TOKENS for message in messages))


@dataclass(frozen=True)
class AuditedRow:
    """A valid row."""

    where: str
    """File and line."""
    text: str
    """All its text."""
    num_messages: int
    """Number of messages."""
    split_key: str
    """Rows with equal keys stay in one split."""
    prompt_key: str
    """The prompt, which should not be in both splits, whatever the split key is."""
    source: str = ""
    """Its source in a mixture."""


def _audit_conversation(conversation: Conversation) -> AuditedRow:
    text = "\n".join(map(message_text, conversation.messages))
    prompt_key = chat.normalize_key(conversation.last_user_message)
    num_messages, source = len(conversation.messages), conversation.source
    return AuditedRow(conversation.where, text, num_messages, conversation.split_key, prompt_key, source)


def _audit_pair(pair: PreferencePair) -> AuditedRow:
    longer = max((pair.chosen, pair.rejected), key=lambda answer: sum(map(len, map(message_text, answer))))
    turns = (*pair.prompt, *longer)
    text = "\n".join(map(message_text, turns))
    prompt_key = chat.normalize_key(pair.last_user_message)
    return AuditedRow(pair.where, text, len(turns), pair.split_key, prompt_key, pair.source)


def _audit_document(document: Document) -> AuditedRow:
    return AuditedRow(document.where, document.text, 0, document.split_key, document.split_key)


Span = tuple[str, bool]
"""Text, and whether it is trained."""


@dataclass(frozen=True)
class RenderedSample:
    """A rendered row."""

    where: str
    """File and line."""
    spans: list[Span]
    """Its text, split where trained and untrained tokens meet."""
    tokens: int
    """Number of tokens."""
    trained_tokens: int
    """Number of trained tokens."""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {"where": self.where, "tokens": self.tokens, "trained_tokens": self.trained_tokens,
                "spans": [{"text": text, "trained": trained} for text, trained in self.spans]}  # fmt: skip


def _render_conversations(items: Sequence[Conversation], tokenizer: Any, settings: Any) -> list[RenderedSample]:
    """Render each conversation with the chat template."""
    return [_render_row(item.where, row, tokenizer) for item in items
            for row in tokenize_conversation(item, tokenizer, settings.assistant_only_loss)]  # fmt: skip


def _render_pairs(items: Sequence[PreferencePair], tokenizer: Any, settings: TrainingConfig) -> list[RenderedSample]:
    """Render each pair as two rows: prompt and chosen, prompt and rejected."""
    samples = []
    for item in items:
        pair = preferences.tokenize_pair(item, tokenizer)
        for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            input_ids = np.concatenate([pair.prompt, answer.input_ids])
            prompt_mask = np.full(len(pair.prompt), settings.spec.loss_on_prompt and answer is pair.chosen)
            loss_mask = np.concatenate([prompt_mask, answer.loss_mask])
            samples.append(_render_row(f"{item.where} ({name})", TokenizedRow(input_ids, loss_mask), tokenizer))
    return samples


def render_shards(folder: Path, count: int) -> list[RenderedSample]:
    """Render rows of packed shards; the first token of a document is not trained."""
    dataset, tokenizer = PackedDataset.open(folder), DocumentTokenizer.open(folder / "tokenizer")
    rows = np.unique(np.linspace(0, dataset.rows() - 1, count).astype(np.int64))
    tokens, positions = dataset.get_rows(rows)
    decode = tokenizer.tokenizer.decode
    return [_to_spans(f"{folder.name} row {row}", row_tokens, row_positions != 0, decode)
            for row, row_tokens, row_positions in zip(rows, tokens, positions, strict=True)]  # fmt: skip


def _render_row(where: str, row: TokenizedRow, tokenizer: Any) -> RenderedSample:
    return _to_spans(where, row.input_ids, row.loss_mask, tokenizer.decode)


def _to_spans(where: str, input_ids: Any, loss_mask: Any, decode: Any) -> RenderedSample:
    edges = [0, *(np.flatnonzero(loss_mask[1:] != loss_mask[:-1]) + 1).tolist(), len(input_ids)]
    spans = [(str(decode(input_ids[start:stop].tolist(), skip_special_tokens=False)), bool(loss_mask[start]))
             for start, stop in itertools.pairwise(edges) if stop > start]  # fmt: skip
    return RenderedSample(where, spans, len(input_ids), int(loss_mask.sum()))


@dataclass(frozen=True)
class RowFormat:
    """How rows of one format are read, measured and shown."""

    load: Callable[[DataConfig, int, Path], Any]
    """Read and check the rows of data, seed and recipe folder."""
    parse: RowParser[Any] | None = None
    """Parse rows, with a quarantine for those that cannot be used; None for images, which only a run reads."""
    audit_item: Callable[[Any], AuditedRow] | None = None
    """What an audit measures of a parsed row."""
    is_packed: bool = False
    """Whether rows are documents, which are packed and never truncated."""
    columns: tuple[str, ...] = ()
    """The lists of messages in a row, which are also the columns of an exported data set."""
    answers: Callable[[Any], Sequence[Sequence[Message]]] = lambda row: ()
    """The messages of a row that are trained."""
    render: Callable[[Any, Any, Any], list[RenderedSample]] | None = None
    """Render loaded rows by a tokenizer and the settings of a stage."""
    embedded: DataConfig | None = None
    """Rows for measuring a stage where its own data is not on this machine."""

    def rows_to_render(self, rows: Sequence[Any]) -> list[Any]:
        """The first row of each kind that a chat template may refuse: with tools, their calls and outputs, reasoning.

        Rendering these answers for all rows before a run, without tokenizing a million of them."""
        kinds: dict[Any, Any] = {}
        for row in rows if self.render else ():
            parts = {(message["role"], *filter(message.get, TEMPLATE_KEYS), message is turns[-1])
                     for turns in (getattr(row, column) for column in self.columns) for message in turns
                     if message["role"] == "tool" or any(map(message.get, TEMPLATE_KEYS))}  # fmt: skip
            if parts or row.tools:
                kinds.setdefault((frozenset(parts), bool(row.tools)), row)
        return [*kinds.values()]

    def is_checked(self, recipe: Recipe) -> bool:
        """Whether rows are read before a run; what prepare reads is not."""
        return self.parse is not None and not (self.is_packed and recipe.prepare)


ROW_FORMATS: dict[RowFormatName, RowFormat] = {
    "pairs": RowFormat(
        load=preferences.load_preferences, parse=preferences.rows_to_pairs, audit_item=_audit_pair,
        columns=("prompt", "chosen", "rejected"),
        answers=lambda pair: (pair.chosen, pair.rejected), render=_render_pairs,
        embedded=DataConfig(dataset_name="field-guide-pairs", test_size=CountOrFraction(4)),
    ),
    "text": RowFormat(
        load=check_raw_text, parse=rows_to_documents, audit_item=_audit_document, is_packed=True,
    ),
    "conversations": RowFormat(
        load=chat.load_conversations, parse=chat.rows_to_conversations, audit_item=_audit_conversation,
        columns=("messages",),
        answers=lambda row: [[message for message in row.messages if message["role"] == "assistant"]],
        render=_render_conversations,
        embedded=DataConfig(dataset_name="field-guide", columns={"question": "prompt", "answer": "completion"},
                            test_size=CountOrFraction(4)),
    ),
    "images": RowFormat(load=lambda data, seed, recipe_dir: images.read_images(data.source, recipe_dir, data.data_dir)),
}  # fmt: skip
"""The row formats by name."""


def infer_row_format(names: Sequence[str], data: DataConfig) -> RowFormatName:
    """The format of data without a recipe, by its columns."""
    candidates: tuple[RowFormatName, ...] = ("pairs", "conversations")
    for row_format in candidates:
        try:
            recognize(names, row_format, data.columns, set(names))
            return row_format
        except RowError:
            pass
    return "text" if data.text_column in names else "conversations"
