"""What `prepare` may say: how raw text becomes clean, deduplicated, packed shards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from modelwright.recipe.values import Frozen, Regex

Share = Annotated[float, Field(ge=0, le=1)]

BOILERPLATE = [
    r"(?i)[^\w\n]*(please )?(enable|activate|turn on) (javascript|cookies)\b.*",
    r"(?i)[^\w\n]*(this|our) (web ?)?site uses cookies\b.*",
    r"(?i)[^\w\n]*(accept|manage|reject) (all )?cookies[^\w\n]*",
    r"(?i)[^\w\n]*(terms (of|and) (use|service|conditions)|privacy policy|cookie policy|all rights reserved)[^\w\n]*",
    r"(?i)[^\w\n]*(share|tweet|print|email|follow us)( this)?( on \w+)?[^\w\n]*",
    r"(?i).*\blorem ipsum dolor\b.*",
]


class Cleaning(Frozen):
    """Which documents and lines are left out before anything is learnt."""

    normalize: Literal["NFC", "NFKC", "none"] = "NFC"
    """Form of Unicode that text is brought to; control characters and stray whitespace go as well."""
    min_words: NonNegativeInt = 5
    """Fewest words of a document."""
    max_words: PositiveInt | None = None
    """Most words of a document."""
    max_mean_word_length: NonNegativeFloat = 30.0
    """Longest mean word, in characters, of a text that is mostly ASCII; encoded data has longer ones."""
    max_symbol_share: Share = 0.5
    """Largest share of ASCII marks among the characters that are not spaces; 1 allows all."""
    max_digit_share: Share = 0.5
    """Largest share of digits among the characters that are not spaces; 1 allows all."""
    max_bullet_lines: Share = 0.9
    """Largest share of lines that begin with a bullet or a dash."""
    max_ellipsis_lines: Share = 0.3
    """Largest share of lines that end in an ellipsis."""
    max_repeated_lines: Share = 0.3
    """Largest share of characters in lines that stood before in the same document."""
    max_repeated_ngrams: Share = 0.5
    """Largest share of five-word runs that stood before in the same document."""
    drop_lines: list[Regex] = BOILERPLATE
    """Lines that match one of these are taken out; the default finds the boilerplate of web pages."""
    drop_documents: dict[str, Regex] = {}
    """Rules of your own: a name, and what a document is dropped for when it is found in it."""


class Deduplicating(Frozen):
    """Which documents are left out because others say the same, or because an examination asks it."""

    exact_dedup: bool = True
    """Drop documents whose words are those of an earlier one."""
    near_dedup: bool = True
    """Drop documents that are nearly an earlier one (MinHash with verified candidates)."""
    near_dedup_threshold: Annotated[float, Field(ge=0.5, le=1)] = 0.7
    """Share of five-word runs in common from which two documents are nearly the same."""
    decontaminate: list[str] = []
    """Evaluation sets (files, folders, hub ids); documents that share a run of words with them are dropped."""
    decontaminate_ngram: Annotated[int, Field(ge=4)] = 13
    """Words in such a run; a shorter evaluation text counts as a whole, from four words on."""


class Packing(Frozen):
    """How documents become rows of tokens."""

    row_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens in a stored row; training may read any length that divides it."""
    tokenizer: Literal["auto", "model", "train"] = "auto"
    """Use the model's tokenizer, or train a byte-level BPE on the text; auto trains for a model without one."""
    vocab_size: PositiveInt = 50_304
    """Tokens of a trained tokenizer; the model's vocabulary is the next multiple of 64."""
    tokenizer_sample_mb: PositiveInt = 64
    """Megabytes of text, taken evenly from all that was kept, that a tokenizer is trained on."""
    fast_tokenizer: bool = True
    """Encode with gigatoken where it is installed and gives the same tokens for a sample of this very text."""
    shard_rows: PositiveInt = 8192
    """Rows in a shard."""


class Prepare(Cleaning, Deduplicating, Packing):
    """From raw text to packed shards: clean, deduplicate, decontaminate, tokenize, pack."""

    max_bad_share: Share = 0.01
    """Largest share of rows that may be unreadable; they are set aside in quarantine.jsonl."""
    max_lost_share: Share = 0.05
    """Largest share of tokens that may be lost with the last, unfilled row of a source."""
    workers: PositiveInt | None = None
    """Processes at work; without it, one for each core. The result does not depend on it."""
    signature_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where near-duplicate signatures are computed: auto takes a GPU whose numbers are the CPU's."""
    keep_work: bool = False
    """Keep the intermediate files once all is done."""
