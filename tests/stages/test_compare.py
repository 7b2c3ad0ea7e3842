"""Answers before and after are scored by style patterns and F1, and model text never acts as markup."""

from __future__ import annotations

import pytest

from modelwright.recipe.load import load
from modelwright.stages.compare import (
    NOTICE,
    answer_f1,
    answer_metrics,
    as_markdown,
    degenerate_fraction,
    is_degenerate,
    style_score,
)
from modelwright.stages.gate import Verdict, judge_stage

STYLE = [r"^Field Note\.", r"\(1\) .+\(2\) .+", "Caution: [A-Z]", r"Ranger's rule: .+\.$"]
FULL = "Field Note. (1) Look.\n(2) Go. Caution: Mind the step. Ranger's rule: Slow is smooth."


def test_the_style_score_is_the_share_of_patterns_found() -> None:
    assert style_score([FULL], STYLE) == 1.0
    assert style_score(["Well, it depends."], STYLE) == 0.0
    assert style_score(["Field Note. Just go."], STYLE) == 0.25


def test_the_style_score_is_the_mean_over_answers() -> None:
    assert style_score([FULL, "Well."], STYLE) == 0.5


def test_a_pattern_may_reach_over_lines_and_the_end_means_the_end() -> None:
    assert style_score(["(1) a\n(2) b"], [STYLE[1]]) == 1.0
    assert style_score([f"{FULL}\nAnd more"], [STYLE[3]]) == 0.0


def test_without_a_voice_there_is_no_score() -> None:
    assert style_score([FULL], []) is None


def test_before_and_after_are_measured_alike() -> None:
    other = FULL.replace("Look", "Walk")
    pairs = [{"question": "?", "before": "Well.", "after": FULL}, {"question": "?", "before": "", "after": other}]
    assert answer_metrics(pairs, STYLE) == {
        "base_style_score": 0.0,
        "style_score": 1.0,
        "base_answer_words": 0.5,
        "answer_words": len(FULL.split()),
        "base_degenerate_answers": 0.5,
        "degenerate_answers": 0.0,
    }


COUNTED = " ".join(f"({number}) Call emergency services and call for help." for number in range(1, 7))
ROUND = (
    "To tie it, wrap the rope around the rail, then pass the rope through the rail" + ", pass the rope through it" * 4
)
STEPS = "To treat a minor burn, follow these steps:"


@pytest.mark.parametrize(
    "answer", ["", " \n", "A:", "...", "Turn it off and on. " * 12, "yes " * 30, "(1) " * 20, COUNTED, ROUND, STEPS]
)
def test_an_answer_that_says_nothing_or_repeats_itself_is_degenerate(answer: str) -> None:
    assert is_degenerate(answer)


@pytest.mark.parametrize(
    "answer", ["144", "No.", FULL, "Yes. " * 3, "1 cup is 237 ml; 2 cups are 474 ml; 3 cups are 711 ml"]
)
def test_short_and_varied_answers_are_not_degenerate(answer: str) -> None:
    assert not is_degenerate(answer)


def test_one_answer_to_different_prompts_is_degenerate_unless_it_is_short() -> None:
    long = "Check the level of the oil with the dipstick while the engine is cold."
    assert degenerate_fraction([long, f"{long} ", "Use a bandage on the cut.", ""]) == 0.75
    assert degenerate_fraction(["Yes.", "Yes.", "About 237 ml.", long]) == 0.0


SURVIVAL = [
    {"question": "How do I treat a burn?", "before": "You should call a doctor, and wait until the doctor arrives.",
     "reference": "Cool the burn under running water for ten minutes and cover it with a clean cloth."},
    {"question": "How do I check my oil?", "before": "Ask a mechanic, who has the tools and the time to do so.",
     "reference": "Pull the dipstick, wipe it, put it back, and read the level against the two marks."},
    {"question": "How many milliliters are in a cup?", "before": "A cup is a unit of volume.",
     "reference": "One cup is about 237 milliliters."},
]  # fmt: skip
NONSENSE = {
    "empty": ["", "A:", "-"],
    "repeating": ["Cool the burn and check the oil and the cup, " * 6] * 3,
    "one for all": ["Cool the burn, wipe the dipstick, and fill the cup with 237 milliliters of water."] * 3,
    "off the question": ["A knot holds.", "Three fires signal.", "Boots dry slowly."],
    "announced": [f"{pair['reference']} Follow these steps:" for pair in SURVIVAL],
    "sound in two of three": [SURVIVAL[0]["reference"], SURVIVAL[1]["reference"], "A:"],
}
"""Answers that a gate of the survival recipes must not open on, however low the loss is."""


@pytest.mark.parametrize("recipe", ["survival-smollm3", "survival-smollm3-tiny"])
def test_the_survival_gates_open_on_better_answers_and_not_on_nonsense(recipe: str) -> None:
    def verdict(after: list[str]) -> Verdict:
        pairs = [{**pair, "after": answer} for pair, answer in zip(SURVIVAL, after, strict=True)]
        metrics = {"eval_loss": 0.5, "base_eval_loss": 2.0, **answer_metrics(pairs, [])}
        return judge_stage(load(recipe, environ={}), "sft", metrics)

    good = [pair["reference"] for pair in SURVIVAL]
    assert verdict(good).open and verdict([pair["before"] for pair in SURVIVAL]).open
    for name, after in NONSENSE.items():
        assert not verdict(after).open, name


@pytest.mark.parametrize("text", ["*loud*", "<script>alert(1)</script>", "[link](http://x)", "![image](y)", "a|b"])
def test_model_text_is_quoted_in_the_page(text: str) -> None:
    page = as_markdown({"notice": NOTICE, "answers": [{"question": text, "before": text, "after": f"x\n{text}"}]})
    heading = next(line for line in page.splitlines() if line.startswith("## "))
    assert text not in heading
    assert all(line.startswith("    ") for line in page.splitlines() if text in line)
    assert NOTICE in page


def test_an_empty_answer_is_shown_as_empty() -> None:
    page = as_markdown({"notice": NOTICE, "answers": [{"question": "Why?", "before": "", "after": "So."}]})
    assert "**Before**" in page
    assert "    So." in page


def test_exactness_is_the_share_of_words_that_two_answers_have_in_common() -> None:
    assert answer_f1("Check the oil when it is cold.", "check the OIL when it is cold") == 1.0
    assert answer_f1("Ask a friend.", "Boil water for three minutes.") == 0.0
    assert answer_f1("boil water", "boil water for three minutes and wait") == pytest.approx(2 * 2 / 9)
    pairs = [{"question": "?", "before": "Well.", "after": "Boil water.", "reference": "Boil water."}]
    assert answer_metrics(pairs, [])["answer_f1"] == 1.0
    assert answer_metrics(pairs, [])["base_answer_f1"] == 0.0
