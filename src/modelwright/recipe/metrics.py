"""What each metric is, in a sentence: what is written beside it in the reference."""

from __future__ import annotations

from collections.abc import Mapping

from modelwright.recipe.evaluation import CHOICE_METRICS, TEXT_METRICS
from modelwright.recipe.schema import MEASURED

MEANINGS: Mapping[str, str] = {
    "eval_loss": "Mean loss over the held-out tokens that would be learnt; for images, over images; for pairs, DPO's.",
    "steps": "Steps done.",
    "tokens": "Tokens seen, padding not counted; for images, images.",
    "trained_tokens": "Tokens learnt from.",
    "seconds": "Time the stage has trained, over all its starts.",
    "eval_bits_per_byte": "Bits that a byte of held-out text costs: comparable between tokenizers.",
    "style_score": "Mean share of compare.style found in the answers; 1 is the whole voice in each.",
    "answer_words": "Mean words of an answer.",
    "exactness": "Mean overlap of words between held-out answers and the model's (F1).",
    "eval_reward_accuracy": "Share of held-out pairs whose better answer gained more than the worse one.",
    "eval_reward_margin": "Mean lead of the better answer over the worse, times beta.",
    "eval_chosen_logp": "Mean log-probability of better answers.",
    "eval_rejected_logp": "Mean log-probability of worse answers.",
    "eval_kl": "How far the answers' tokens have moved from the reference (estimate of the KL divergence).",
    "eval_sft_loss": "Mean loss over the better answers, as sft would have it: what preferences must not destroy.",
    "eval_accuracy": "Share of held-out images whose class is told.",
    "text_loss": "Mean loss over the tokens of evaluate.text.",
    "text_perplexity": "e to the power of text_loss.",
    "text_bits_per_byte": "Bits that a byte of evaluate.text costs.",
    "choice_accuracy": "Share of questions whose right option is the likeliest.",
    "choice_accuracy_norm": "The same, with likelihoods per byte of the option.",
}
"""A metric of the model before the stage has base_ before its name, one of the stage before it has parent_."""


def known() -> tuple[str, ...]:
    """Every metric that is measured, without base_ and parent_."""
    own = (name for names in MEASURED.values() for name in names if not name.startswith("base_"))
    return tuple(dict.fromkeys((*own, *TEXT_METRICS, *CHOICE_METRICS)))


def measured_by(metric: str) -> list[str]:
    """The stages that measure it."""
    stages = [stage for stage, names in MEASURED.items() if metric in names]
    return stages or ["evaluate"]
