"""Measure a language model by what it finds likely: the loss of texts, and the likeliest of several options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.data.chat import Encoded
from modelwright.data.choices import Choice
from modelwright.data.shards import Shards
from modelwright.data.tokenizer import Encoder
from modelwright.models.text import hidden_states, logits_of
from modelwright.tasks.sft import collate

ROWS = 8
"""Rows that are measured at once."""
Metrics = dict[str, float | None]


def loss_of_texts(model: Any, encoder: Encoder, texts: Sequence[str], max_length: int) -> Metrics:
    """Loss, perplexity and bits per byte of documents; long ones in pieces."""
    pieces: list[Encoded] = []
    for text in texts:
        tokens = encoder.encode([text]).tokens.astype(np.int32)
        cut = [tokens[start : start + max_length] for start in range(0, len(tokens), max_length)]
        pieces += [Encoded(piece, np.ones(len(piece), dtype=np.bool_)) for piece in cut if len(piece) > 1]
    pieces.sort(key=len)
    summed, counted = 0.0, 0
    for start in range(0, len(pieces), ROWS):
        batch = collate([[piece] for piece in pieces[start : start + ROWS]])
        summed -= float(_log_probabilities(model, batch.inputs).sum())
        counted += batch.trained
    return _as_metrics(summed, counted, sum(len(text.encode()) for text in texts))


def loss_of_shards(model: Any, shards: Shards, max_length: int, max_rows: int) -> Metrics:
    """The same of packed rows, the first ones where there are many."""
    length = math.gcd(shards.length, max_length)
    rows = min(shards.rows(length), max_rows * (max_length // length))
    summed, counted = 0.0, 0
    for start in range(0, rows, ROWS):
        tokens, positions = shards.read(range(start, min(start + ROWS, rows)), length)
        follows = np.zeros(tokens.shape, dtype=np.bool_)
        follows[:, :-1] = positions[:, 1:] != 0  # the first word of a document has nothing before it
        inputs = {"tokens": tokens, "positions": positions, "learnt": np.flatnonzero(follows)}
        found = _log_probabilities(model, {name: torch.from_numpy(value) for name, value in inputs.items()})
        summed, counted = summed - float(found.sum()), counted + len(found)
    # the bytes of what was foretold, as a share of all bytes by the share of its tokens
    return _as_metrics(summed, counted, shards.text_bytes * counted / max(1, shards.tokens))


def accuracy_of_choices(model: Any, tokenizer: Any, questions: Sequence[Choice], max_length: int) -> Metrics:
    """How often the right option is the likeliest, by the whole option and by each of its bytes."""
    rows = [_option(tokenizer, item.prompt, option, max_length) for item in questions for option in item.options]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    likely = np.zeros(len(rows))
    for start in range(0, len(rows), ROWS):
        mine = order[start : start + ROWS]
        batch = collate([[rows[row]] for row in mine])
        found = _log_probabilities(model, batch.inputs)
        owners = batch.inputs["learnt"] // batch.inputs["tokens"].shape[1]
        sums = torch.zeros(len(mine), dtype=torch.float64).index_add_(0, owners, found.double())
        likely[mine] = sums.numpy()
    right, right_by_byte, place = 0, 0, 0
    for item in questions:
        mine_likely = likely[place : place + len(item.options)]
        sizes = np.array([max(1, len(option.encode())) for option in item.options])
        right += int(mine_likely.argmax()) == item.answer
        right_by_byte += int((mine_likely / sizes).argmax()) == item.answer
        place += len(item.options)
    count = max(1, len(questions))
    return {"choice_accuracy": right / count, "choice_accuracy_norm": right_by_byte / count}


@torch.inference_mode()
def _log_probabilities(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The log-probability of the token after each learnt place: [count], on the CPU."""
    device = next(model.parameters()).device
    tokens, positions, places = (inputs[name].to(device) for name in ("tokens", "positions", "learnt"))
    hidden = hidden_states(model, tokens, positions)
    logits = logits_of(model, hidden.flatten(0, 1)[places]).float()
    targets = tokens.flatten()[places + 1]
    return (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)).cpu()


def _option(tokenizer: Any, prompt: str, option: str, max_length: int) -> Encoded:
    """The prompt and one option; only the option counts, and a long prompt loses its beginning."""
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    after = tokenizer(f" {option}", add_special_tokens=False)["input_ids"][: max_length - 1]
    before = before[-(max_length - len(after)) :]
    trained = np.zeros(len(before) + len(after), dtype=np.bool_)
    trained[len(before) :] = True
    return Encoded(np.array([*before, *after], dtype=np.int32), trained)


def _as_metrics(summed: float, counted: int, text_bytes: float) -> Metrics:
    if not counted:
        return {}
    loss = summed / counted
    return {
        "text_loss": loss,
        "text_perplexity": math.exp(min(loss, 700.0)),
        "text_bits_per_byte": summed / math.log(2.0) / max(1.0, text_bytes),
    }
