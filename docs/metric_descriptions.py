"""One sentence about each metric, for the reference pages."""

from __future__ import annotations

from collections.abc import Mapping

from modelwright.recipe.sections import CHOICE_METRICS, PERPLEXITY_METRICS
from modelwright.recipe.stage_specs import STAGES

METRIC_DESCRIPTIONS: Mapping[str, str] = {
    "eval_loss": (
        "Mean loss over the trained tokens of held-out rows; for images and pairs, over these. With a mixture of "
        "experts it includes the load-balancing loss, logged as eval_router_aux_loss."
    ),
    "steps": "Optimizer steps.",
    "tokens": "Tokens processed, without padding.",
    "images": "Images processed.",
    "trained_tokens": "Tokens that the loss was computed on.",
    "seconds": "Training time of the stage in seconds, over all restarts.",
    "eval_bits_per_byte": "Bits per byte of held-out text: comparable between tokenizers.",
    "style_score": "Mean fraction of compare.style_patterns found in an answer.",
    "answer_words": "Mean words of an answer.",
    "answer_f1": "Mean overlap of words between held-out answers and the model's (F1).",
    "degenerate_answers": "Fraction of answers that say nothing, repeat themselves or one another.",
    "eval_reward_accuracy": "Fraction of held-out pairs whose chosen answer has the higher reward.",
    "eval_reward_margin": "Mean reward of the chosen minus that of the rejected answer.",
    "eval_chosen_logp": "Mean log-probability of the chosen answers.",
    "eval_rejected_logp": "Mean log-probability of the rejected answers.",
    "eval_kl": "Estimate of the KL divergence from the reference model on the answers.",
    "eval_sft_loss": "Mean negative log-likelihood of the chosen answers, as in sft.",
    "eval_log_odds": "Mean log odds ratio of the chosen over the rejected answers, by mean log-probability.",
    "eval_nll_loss": "Mean negative log-likelihood of the tokens of prompts and chosen answers.",
    "eval_accuracy": "Accuracy on the held-out images.",
    "text_loss": "Mean loss over the tokens of evaluate.perplexity_text.",
    "text_perplexity": "e to the power of text_loss.",
    "text_bits_per_byte": "Bits per byte of evaluate.perplexity_text.",
    "choice_accuracy": "Fraction of questions whose correct option has the highest likelihood.",
    "choice_accuracy_norm": "The same, with likelihoods per byte of the option.",
    "answers.NAME": "Mean score of the verifier NAME of evaluate.answers, from 0 to 1; exact_match: the accuracy.",
    "answers.score": "Mean of all verifiers of evaluate.answers, by their weights.",
}
"""A metric of the model before the stage has base_ before its name, one of the stage before it has parent_."""


def metric_names() -> tuple[str, ...]:
    """Every metric that is measured, without base_ and parent_."""
    own = (name for spec in STAGES.values() for name in spec.metrics if not name.startswith("base_"))
    return tuple(dict.fromkeys((*own, *PERPLEXITY_METRICS, *CHOICE_METRICS, "answers.NAME", "answers.score")))


def stages_reporting(metric: str) -> list[str]:
    """The stages that measure it."""
    stages = [stage for stage, spec in STAGES.items() if metric in spec.metrics]
    return stages or ["evaluate"]
