"""Losses as pure functions of tensors."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from modelwright.recipe.training import Preference

IGNORED = -100
"""Stands where no token comes next."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over rows. logits: [rows, words]; targets: [rows] int64, IGNORED for rows without one."""
    return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORED)


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """How likely each target is, as a logarithm: [rows] float32. logits: [rows, words]; targets: [rows] int64."""
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def preference_loss(ratios: Tensor, lengths: Tensor, wish: Preference) -> Tensor:
    """The loss of each pair: [pairs].

    ratios: [pairs, 2], how much likelier than before the chosen and the rejected answer have become, as logarithms;
    lengths: [pairs, 2], tokens in them, by which IPO divides (its authors' published results do so too).
    """
    if wish.loss_type == "ipo":
        means = ratios / lengths.clamp(min=1)
        return (means[:, 0] - means[:, 1] - 1 / (2 * wish.beta)) ** 2
    margins = wish.beta * (ratios[:, 0] - ratios[:, 1])
    if wish.loss_type == "hinge":
        return F.relu(1 - margins)
    smooth = wish.label_smoothing
    return -(1 - smooth) * F.logsigmoid(margins) - smooth * F.logsigmoid(-margins)
