"""One sentence about each metric, for the reference pages."""

from __future__ import annotations

from collections.abc import Mapping

from modelwright.recipe.schema import STAGE_METRICS
from modelwright.recipe.sections import CHOICE_METRICS, PERPLEXITY_METRICS

METRIC_DESCRIPTIONS: Mapping[str, str] = {
    "eval_loss": "Mean loss over the held-out tokens that would be learnt; for images, over images; for pairs, DPO's.",
    "steps": "Steps done.",
    "tokens": "Tokens seen, padding not counted; for images, images.",
    "trained_tokens": "Tokens learnt from.",
    "seconds": "Time the stage has trained, over all its starts.",
    "eval_bits_per_byte": "Bits that a byte of held-out text costs: comparable between tokenizers.",
    "style_score": "Mean share of compare.style_patterns found in the answers; 1 is the whole voice in each.",
    "answer_words": "Mean words of an answer.",
    "answer_f1": "Mean overlap of words between held-out answers and the model's (F1).",
    "eval_reward_accuracy": "Share of held-out pairs whose better answer gained more than the worse one.",
    "eval_reward_margin": "Mean lead of the better answer over the worse, times beta.",
    "eval_chosen_logp": "Mean log-probability of better answers.",
    "eval_rejected_logp": "Mean log-probability of worse answers.",
    "eval_kl": "How far the answers' tokens have moved from the reference (estimate of the KL divergence).",
    "eval_sft_loss": "Mean loss over the better answers, as sft would have it: what preferences must not destroy.",
    "eval_accuracy": "Share of held-out images whose class is told.",
    "text_loss": "Mean loss over the tokens of evaluate.perplexity_text.",
    "text_perplexity": "e to the power of text_loss.",
    "text_bits_per_byte": "Bits that a byte of evaluate.perplexity_text costs.",
    "choice_accuracy": "Share of questions whose right option is the likeliest.",
    "choice_accuracy_norm": "The same, with likelihoods per byte of the option.",
}
"""A metric of the model before the stage has base_ before its name, one of the stage before it has parent_."""


def metric_names() -> tuple[str, ...]:
    """Every metric that is measured, without base_ and parent_."""
    own = (name for names in STAGE_METRICS.values() for name in names if not name.startswith("base_"))
    return tuple(dict.fromkeys((*own, *PERPLEXITY_METRICS, *CHOICE_METRICS)))


def stages_reporting(metric: str) -> list[str]:
    """The stages that measure it."""
    stages = [stage for stage, names in STAGE_METRICS.items() if metric in names]
    return stages or ["evaluate"]
