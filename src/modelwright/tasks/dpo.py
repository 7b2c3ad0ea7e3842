"""Direct preference optimisation: the model learns which of two answers to a prompt is the better one.

A row holds [prompt | chosen | rejected]; the answers cannot see each other, so that the prompt is computed once.
How likely the answers were before training, the reference, is measured once by the model itself (`reference.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelwright.data.preferences import EncodedPair, EncodedPairs, Preferences, encode_pairs
from modelwright.engine.task import Batch
from modelwright.models.attention import HALVES, Paths
from modelwright.models.branches import branch_mask, paths_of, takes_paths, why_not
from modelwright.models.spread import Spread, spread_of
from modelwright.models.text import hidden_states, logits_of, plain_head
from modelwright.recipe.schema import Dpo
from modelwright.recipe.training import Preference
from modelwright.tasks.head_loss import likelihoods
from modelwright.tasks.layout import multiple_of
from modelwright.tasks.losses import log_probabilities, preference_loss

Array = np.ndarray[Any, Any]
EVEN = 8
"""Rows with a mask are a multiple of this long, without which a GPU's masked attention copies the mask."""
MOST = 20.0
"""Where the exponential of a logarithm is held, so that one token cannot make the distance infinite."""


class PairLoss(nn.Module):
    """A language model whose forward gives what is measured of pairs, the loss first, summed over them."""

    def __init__(self, model: Any, wish: Preference) -> None:
        super().__init__()
        self.model, self.wish = model, wish

    def forward(self, tokens: Tensor, positions: Tensor, answers: Tensor, lengths: Tensor, **beside: Tensor) -> Tensor:
        """tokens, positions: [rows, length] int64. Returns [measures], or without a reference [count] logarithms.

        answers: [2, count] int64, flat places that foretell an answer's tokens, and those tokens;
        lengths: [2 × pairs] int64, tokens in each pair's chosen and rejected answer; beside: branches, as tokens,
        where a row holds both answers, what `between_answers` takes where attention needs no mask, reference: [count]
        float32.
        """
        branches, reference = beside.get("branches"), beside.get("reference")
        between = between_answers(beside) if self._in_halves() else None
        mask = None if branches is None or between is not None else branch_mask(self.model, positions, branches)
        hidden = hidden_states(self.model, tokens, positions, mask, between)
        likely = self._likely(hidden.flatten(0, 1).index_select(0, answers[0]), answers[1])
        return likely if reference is None else self._measure(likely, reference, lengths)

    def _likely(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """How likely each answer token is, as a logarithm. hidden: [count, width]; targets: [count] int64."""
        head = plain_head(self.model)
        if head is not None:
            return likelihoods(hidden, head, targets)
        return log_probabilities(logits_of(self.model, hidden), targets)

    def _in_halves(self) -> bool:
        """Whether attention is computed in bf16 or fp16, which alone the way without a mask can."""
        return torch.is_autocast_enabled("cuda") or next(self.model.parameters()).dtype in HALVES

    def _measure(self, likely: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        if not len(lengths):
            return likely.sum() * likely.new_zeros(len(DpoTask.measures))  # nothing, yet through every weight
        counts = lengths.view(-1, 2)
        after, before = (_sums(values, lengths).view(-1, 2) for values in (likely, reference))
        ratios = after - before
        loss = preference_loss(ratios, counts, self.wish)
        with torch.no_grad():
            margins = self.wish.beta * (ratios[:, 0] - ratios[:, 1])
            moved = likely - reference
            watched = [
                (margins > 0).sum(), margins.sum(), after[:, 0].sum(), after[:, 1].sum(),
                (moved.clamp(max=MOST).exp() - 1 - moved).sum(), -after[:, 0].sum(), counts[:, 0].sum(), counts.sum(),
            ]  # fmt: skip
        return torch.stack([loss.sum(), *(value.to(loss.dtype) for value in watched)])


class DpoTask:
    """Pairs as rows; the rows are held against a reference that is set before training."""

    measures: tuple[str, ...] = (
        *("loss", "reward_accuracy", "reward_margin", "chosen_logp", "rejected_logp"),
        *("kl per answer_tokens", "sft_loss per chosen_tokens", "chosen_tokens", "answer_tokens"),
    )
    """The distance kl is estimated over the answers' tokens by r - 1 - log r, r how much likelier each has become."""
    compared = "sft_loss per chosen_tokens"
    """What two ways of computing are held against each other by; the loss of pairs is a difference of two such."""

    def __init__(self, model: Any, tokenizer: Any, data: Preferences, settings: Dpo, stops: Collection[int]) -> None:
        self.module: nn.Module = PairLoss(model, settings)
        self.not_shared = why_not(model) if settings.share_prompt else "share_prompt is false"
        self.train_set = encode_pairs(data.train, tokenizer, settings, stops)
        self.held_out_set = encode_pairs(data.held_out, tokenizer, settings, stops) if data.held_out else EncodedPairs()
        ways = (spread_of, paths_of) if self.not_shared is None else ()
        self.way = next((way for way in ways if takes_paths(model, way)), None)
        self.references: dict[str, list[Array]] = {}
        self._multiple = multiple_of(settings)

    @property
    def sides(self) -> dict[str, list[EncodedPair]]:
        """The pairs that move the weights and those that only measure, by name."""
        return {"train": self.train_set.rows, "held_out": self.held_out_set.rows}

    @property
    def rows(self) -> int:
        return len(self.train_set.rows)

    @property
    def held_out_rows(self) -> int:
        return len(self.held_out_set.rows)

    def length(self, row: int) -> int:
        """Tokens in a pair, its prompt counted once."""
        return len(self.train_set.rows[row])

    def batch(self, rows: Sequence[int], step: int = 0) -> Batch:
        return self._with_reference("train", rows)

    def trial_batch(self, rows: Sequence[int], step: int = 0) -> Batch:
        """A batch to go through before the reference is measured: it is held against none."""
        batch = self.bare_batch("train", rows)
        none = torch.zeros(batch.inputs["answers"].shape[1])
        return Batch({**batch.inputs, "reference": none}, batch.trained, batch.tokens)

    def held_out_batch(self, rows: Sequence[int]) -> Batch:
        return self._with_reference("held_out", rows)

    def bare_batch(self, side: str, rows: Sequence[int]) -> Batch:
        """A batch without its reference: the module gives the logarithm of each answer token's likelihood."""
        pairs = [self.sides[side][row] for row in rows]
        batch = collate(pairs, shared=self.not_shared is None, multiple=self._multiple)
        return batch if self.way is None else told_by(self.way, batch)

    def _with_reference(self, side: str, rows: Sequence[int]) -> Batch:
        assert not rows or self.references, "the reference is measured before anything is learnt"
        batch = self.bare_batch(side, rows)
        known = [self.references[side][row] for row in rows]
        reference = np.concatenate(known) if known else np.zeros(0, dtype=np.float32)
        return Batch({**batch.inputs, "reference": torch.from_numpy(reference)}, batch.trained, batch.tokens)


def collate(pairs: Sequence[EncodedPair], shared: bool = True, multiple: int = 1) -> Batch:
    """Lay pairs out in rows of equal length: one row a pair with its prompt once, or one row an answer.

    Padding stands to the right, where no real token can see it; the length is a multiple as asked for.
    """
    rows = [_row(pair.prompt, [pair.chosen, pair.rejected]) for pair in pairs] if shared else [
        _row(pair.prompt, [answer]) for pair in pairs for answer in (pair.chosen, pair.rejected)
    ]  # fmt: skip
    length = max((len(tokens) for tokens, *_ in rows), default=2)
    multiple = math.lcm(multiple, EVEN if shared else 1)
    length = -(-length // multiple) * multiple
    laid = np.zeros((3, max(1, len(rows)), length), dtype=np.int64)  # tokens, positions, branches
    places: list[Array] = []
    for number, (tokens, positions, branches, foretold) in enumerate(rows):
        laid[:, number, : len(tokens)] = tokens, positions, branches
        laid[1, number, len(tokens) :] = np.arange(length - len(tokens))
        laid[2, number, len(tokens) :] = 3
        places.append(number * length + foretold)
    learnt = [answer.tokens[answer.trained] for pair in pairs for answer in (pair.chosen, pair.rejected)]
    inputs = {
        "tokens": laid[0],
        "positions": laid[1],
        "answers": np.stack([_joined(places), _joined(learnt)]),
        "lengths": np.array([len(tokens) for tokens in learnt], dtype=np.int64),
        **({"branches": laid[2]} if shared else {}),
    }
    return Batch(
        inputs={name: torch.from_numpy(value) for name, value in inputs.items()},
        trained=len(pairs),
        tokens=sum(len(tokens) for tokens, *_ in rows),
    )


def between_answers(inputs: dict[str, Tensor]) -> Spread | Paths | None:
    """How attention without a mask is told of answers, where the batch says it."""
    if "places" in inputs:
        return Spread(*(inputs[name] for name in Spread._fields))
    return Paths(inputs["keys"], inputs["starts"]) if "keys" in inputs else None


def told_by(way: Callable[[Tensor], Spread | Paths], batch: Batch) -> Batch:
    """The same batch for attention that is told so, without a mask, who sees whom."""
    # paths leave nobody out: padding, which no answer sees, goes with the last one
    laid = way(batch.inputs["branches"].clamp(max=2 if way is paths_of else 3))._asdict()
    tensors = {name: each for name, each in laid.items() if isinstance(each, Tensor)}
    return replace(batch, inputs={**batch.inputs, **tensors})


def _row(prompt: Array, answers: Sequence[Any]) -> tuple[Array, Array, Array, Array]:
    """Tokens, positions and branches of one row, and the places that foretell the answers' trained tokens."""
    start, parts = len(prompt), [prompt]
    positions, branches, foretold = [np.arange(start)], [np.zeros(start, dtype=np.int64)], []
    for branch, answer in enumerate(answers, 1):
        parts.append(answer.tokens)
        positions.append(len(prompt) + np.arange(len(answer)))
        branches.append(np.full(len(answer), branch))
        before = np.arange(start - 1, start - 1 + len(answer))
        before[0] = len(prompt) - 1  # the first word of each answer is foretold by the last of the prompt
        foretold.append(before[answer.trained])
        start += len(answer)
    return tuple(np.concatenate(each) for each in (parts, positions, branches, foretold))  # type: ignore[return-value]


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Neighbours added up: [count] into [len(lengths)], the same way at every start, on every device."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def _joined(arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)
