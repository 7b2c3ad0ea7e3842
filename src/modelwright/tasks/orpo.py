"""Odds ratio preference optimization (ORPO): fine-tune on the chosen answers and prefer them, without a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.data.packing import NDArray
from modelwright.data.preferences import TokenizedPair
from modelwright.engine.task import MicroBatch
from modelwright.tasks.dpo import PairLoss, PairTask, segment_sum

MAX_LOGP = -1e-6
"""Upper bound of an answer's mean log-prob: the odds of a certain answer would be infinite."""


class OrpoLoss(PairLoss):
    """The ORPO loss.

    As in TRL, it is the negative log-likelihood per token of prompts and chosen answers, plus beta times
    -log sigmoid(log odds ratio) per pair, where the log-prob of an answer is the mean over its tokens. Both are means
    over the global batch, for any micro-batch size; TRL averages the means of its micro-batches.
    """

    own_inputs = ("prompt_lengths", "nll_weight")
    metric_names = ("loss", "reward_accuracy", "reward_margin", "log_odds", "nll_loss per nll_tokens", "nll_tokens")
    """The reward of an answer is beta times its mean log-prob."""

    def metrics(self, logps: Tensor, answer_lengths: Tensor, prompt_lengths: Tensor, nll_weight: Tensor) -> Tensor:
        """logps: [count] float32, of all answers, then of all prompts; nll_weight: [] float32, see `_nll_weight`."""
        counts = answer_lengths.view(-1, 2)
        sums = segment_sum(logps, torch.cat([answer_lengths, prompt_lengths]))
        answer_sums, prompt_sums = sums[: counts.numel()].view(-1, 2), sums[counts.numel() :]
        chosen, rejected = (answer_sums / counts.clamp(min=1)).clamp(max=MAX_LOGP).unbind(1)
        log_odds = chosen - rejected - (-torch.expm1(chosen)).log() + (-torch.expm1(rejected)).log()
        nll = -answer_sums[:, 0] - prompt_sums
        loss = nll * nll_weight - self.settings.beta * F.logsigmoid(log_odds)
        margins = self.settings.beta * (chosen - rejected)
        nll_tokens = counts[:, 0].sum() + prompt_lengths.sum()
        metrics = [(margins > 0).sum(), margins.sum(), log_odds.sum(), nll.sum(), nll_tokens]
        return torch.stack([loss.sum(), *(value.detach().to(loss.dtype) for value in metrics)])


class OrpoTask(PairTask):
    """Pairs whose prompts are targets too."""

    loss_class = OrpoLoss

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._nll_weights = {split: _nll_weight(pairs) for split, pairs in self.splits.items()}

    def set_global_batch(self, rows: Sequence[int]) -> None:
        self._nll_weights["train"] = _nll_weight([self.train_set.rows[row] for row in rows])

    def collate(self, split: str, rows: Sequence[int]) -> MicroBatch:
        """The same with the tokens of prompts as further targets."""
        micro_batch = super().collate(split, rows)
        pair_stride = micro_batch.inputs["tokens"].shape[1] * (1 if self.sharing_blocker is None else 2)
        prompts = [_prompt_targets(self.splits[split][row], index * pair_stride) for index, row in enumerate(rows)]
        targets = [micro_batch.inputs["positions_and_targets"], *map(torch.from_numpy, prompts)]
        inputs = {
            "positions_and_targets": torch.cat(targets, dim=1),
            "prompt_lengths": torch.tensor([prompt.shape[1] for prompt in prompts], dtype=torch.int64),
            "nll_weight": torch.tensor(self._nll_weights[split], dtype=torch.float32),
        }
        return replace(micro_batch, inputs={**micro_batch.inputs, **inputs})


def _nll_weight(pairs: Sequence[TokenizedPair]) -> float:
    """Pairs of a global batch divided by the predicted tokens of its prompts and chosen answers."""
    return len(pairs) / max(1, sum(len(pair.prompt) + len(pair.chosen) - 1 for pair in pairs))


def _prompt_targets(pair: TokenizedPair, row_start: int) -> NDArray:
    """Flat logit positions and ids of the tokens of prompt and chosen answer that are no answer targets: [2, count]."""
    tokens = np.concatenate([pair.prompt, pair.chosen.input_ids]).astype(np.int64)
    index = np.flatnonzero(np.concatenate([np.ones(len(pair.prompt), dtype=np.bool_), ~pair.chosen.loss_mask]))[1:]
    return np.stack([row_start + index - 1, tokens[index]])
