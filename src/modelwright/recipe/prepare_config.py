"""The section prepare of a recipe: from raw text to packed shards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from modelwright.recipe.sections import Fraction, FrozenModel, RegexStr

BOILERPLATE = [
    r"(?i)[^\w\n]*(please )?(enable|activate|turn on) (javascript|cookies)\b.*",
    r"(?i)[^\w\n]*(this|our) (web ?)?site uses cookies\b.*",
    r"(?i)[^\w\n]*(accept|manage|reject) (all )?cookies[^\w\n]*",
    r"(?i)[^\w\n]*(terms (of|and) (use|service|conditions)|privacy policy|cookie policy|all rights reserved)[^\w\n]*",
    r"(?i)[^\w\n]*(share|tweet|print|email|follow us)( this)?( on \w+)?[^\w\n]*",
    r"(?i).*\blorem ipsum dolor\b.*",
]


class CleaningConfig(FrozenModel):
    """Document and line filters."""

    normalize: Literal["NFC", "NFKC", "none"] = "NFC"
    """Unicode normalization; control characters and stray whitespace are removed too."""
    min_words: NonNegativeInt = 5
    """Minimum number of words of a document."""
    max_words: PositiveInt | None = None
    """Maximum number of words of a document."""
    max_mean_word_length: NonNegativeFloat = 30.0
    """Maximum mean word length in characters, for text that is mostly ASCII; finds encoded data."""
    max_symbol_ratio: Fraction = 0.5
    """Maximum fraction of ASCII symbols among non-space characters; 1 disables the filter."""
    max_digit_ratio: Fraction = 0.5
    """Maximum fraction of digits among non-space characters; 1 disables the filter."""
    max_bullet_lines: Fraction = 0.9
    """Maximum fraction of lines that begin with a bullet or a dash."""
    max_ellipsis_lines: Fraction = 0.3
    """Maximum fraction of lines that end in an ellipsis."""
    max_repeated_lines: Fraction = 0.3
    """Maximum fraction of characters in lines that repeat an earlier line of the document."""
    max_repeated_ngrams: Fraction = 0.5
    """Maximum fraction of word 5-grams that repeat an earlier one of the document."""
    drop_lines: list[RegexStr] = BOILERPLATE
    """Lines that match one of these are removed; the default matches the boilerplate of web pages."""
    drop_documents: dict[str, RegexStr] = {}
    """Custom filters, as {name: regular expression}; documents that match are dropped."""


class DedupConfig(FrozenModel):
    """Exact and MinHash deduplication, and decontamination."""

    exact_dedup: bool = True
    """Drop documents that have the same words as an earlier one."""
    minhash_dedup: bool = True
    """Drop near-duplicates of earlier documents (MinHash LSH with verified candidates)."""
    jaccard_threshold: Annotated[float, Field(ge=0.5, le=1)] = 0.7
    """Jaccard similarity of word 5-grams from which two documents are near-duplicates."""
    decontaminate_against: list[str] = []
    """Evaluation sets (files, folders, hub ids); documents that share an n-gram with them are dropped."""
    decontaminate_ngram: Annotated[int, Field(ge=4)] = 13
    """Words of such an n-gram; a shorter evaluation text of at least four words is matched whole."""


class ShardConfig(FrozenModel):
    """Tokenization and packing into shards."""

    sequence_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens per stored row; training may use any length that divides it."""
    tokenizer: Literal["auto", "model", "train"] = "auto"
    """The model's tokenizer, or a byte-level BPE trained on the text; auto trains if there is none."""
    vocab_size: PositiveInt = 50_304
    """Vocabulary size of a trained tokenizer; that of the model is the next multiple of 64."""
    tokenizer_sample_mb: PositiveInt = 64
    """Megabytes of text, sampled evenly, that a tokenizer is trained on."""
    use_gigatoken: bool = True
    """Tokenize with gigatoken, if installed and its tokens are the same for a sample."""
    rows_per_shard: PositiveInt = 8192
    """Rows per shard."""


class PrepareConfig(CleaningConfig, DedupConfig, ShardConfig):
    """From raw text to packed shards: clean, deduplicate, decontaminate, tokenize, pack."""

    max_invalid_fraction: Fraction = 0.01
    """Maximum fraction of unreadable rows; they are moved to quarantine.jsonl."""
    max_dropped_token_fraction: Fraction = 0.05
    """Maximum fraction of tokens that may be dropped with the last partial row of each source."""
    num_proc: PositiveInt | None = None
    """Number of processes; without it, one per core. The result does not depend on it."""
    minhash_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where MinHash signatures are computed; auto uses a GPU if its results equal those of the CPU."""
    keep_intermediate_files: bool = False
    """Keep the intermediate files after prepare has finished."""
