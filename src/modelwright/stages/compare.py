"""Answer the same questions before and after, with the same prompt and decoding, and measure the voice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import mean
from typing import Any

import xxhash

from modelwright.data.conversations import Message, ask
from modelwright.report.lines import plain
from modelwright.runs.folder import read_json, write_json, write_text
from modelwright.serve.ask import Answerer
from modelwright.stages.context import Context
from modelwright.stages.kinds import Ingredients

NOTICE = "These answers show what training changed; they are a demonstration and no advice."
METRICS = ("style_score", "base_style_score", "answer_words", "base_answer_words", "exactness", "base_exactness")
WORD = re.compile(r"\w+")


def compare(context: Context, found: Ingredients, stage: str) -> dict[str, float | None]:
    """Write demo_outputs and return its metrics; answers that stand already for these models are kept."""
    wish = context.recipe.compare
    questions, system_prompt = questions_of(context, found), context.recipe.data_of(stage).system_prompt
    if not questions:
        return {}
    result = read_json(context.folder.result(stage))
    key = xxhash.xxh3_128_hexdigest(
        repr([found.model_fingerprint, result["files"], questions, wish.model_dump()]).encode()
    )
    path = context.folder.demo_outputs / "before_after.json"
    kept = read_json(path) if path.exists() else {}
    again = kept.get("key") == key
    if not again:
        context.journal.add("answering", stage=stage, questions=len(questions))
        asked = [ask(question, system_prompt) for question in questions]
        before = _answers(context, asked, found.model.path)
        after = _answers(context, asked, context.folder.model(stage))
        pairs = [{"question": q, "before": b, "after": a} for q, b, a in zip(questions, before, after, strict=True)]
        wanted = references(found)
        pairs = [{**pair, "reference": wanted[q]} if (q := pair["question"]) in wanted else pair for pair in pairs]
        kept = {"key": key, "notice": NOTICE, "system_prompt": system_prompt,
                "metrics": measure(pairs, wish.style), "answers": pairs}  # fmt: skip
        write_json(path, kept)
        write_text(path.with_suffix(".md"), as_markdown(kept))
    context.journal.add(
        "answers", stage=stage, again=again, **{name: kept[name] for name in ("metrics", "answers", "notice")}
    )
    metrics: dict[str, float | None] = kept["metrics"]
    return metrics


def questions_of(context: Context, found: Ingredients) -> list[str]:
    """The recipe's questions, then held-out ones that the model never trained on."""
    wish = context.recipe.compare
    held_out = [item.question for item in found.data.held_out if len(item.messages) <= 3]
    return [*wish.prompts, *dict.fromkeys(held_out)][: len(wish.prompts) + wish.held_out_prompts]


def references(found: Ingredients) -> dict[str, str]:
    """The answers that the held-out questions have in the data, by question."""
    return {
        item.question: item.messages[-1]["content"]
        for item in found.data.held_out
        if item.messages[-1]["role"] == "assistant"
    }


def measure(pairs: Sequence[dict[str, str]], style: Sequence[str]) -> dict[str, float | None]:
    """The voice and the length of the answers, before and after, and how near they come to the data's own."""
    before, after = [pair["before"] for pair in pairs], [pair["after"] for pair in pairs]
    known = [pair for pair in pairs if "reference" in pair]
    exact: dict[str, float | None] = {
        name: round(mean(exactness(pair[side], pair["reference"]) for pair in known), 4)
        for name, side in (("base_exactness", "before"), ("exactness", "after"))
        if known
    }
    return {
        **exact,
        "base_style_score": style_score(before, style),
        "style_score": style_score(after, style),
        "base_answer_words": round(mean(len(answer.split()) for answer in before), 1),
        "answer_words": round(mean(len(answer.split()) for answer in after), 1),
    }


def exactness(answer: str, reference: str) -> float:
    """How much of two answers is the same, word for word in any order: F1 of their words, from 0 to 1."""
    ours, theirs = (Counter(WORD.findall(text.lower())) for text in (answer, reference))
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total()) if shared else 0.0


def style_score(answers: Sequence[str], style: Sequence[str]) -> float | None:
    """The mean share of the voice's patterns found in an answer; None where no voice is described."""
    if not style:
        return None
    patterns = [re.compile(pattern, re.DOTALL) for pattern in style]
    return round(mean(mean(bool(pattern.search(answer)) for pattern in patterns) for answer in answers), 4)


def as_markdown(kept: dict[str, Any]) -> str:
    """The comparison as a page; model text is quoted, so that nothing in it acts as markup."""
    lines = ["# Before and after", "", f"> {kept['notice']}", ""]
    for pair in kept["answers"]:
        lines += [f"## {_quiet(pair['question'])}", ""]
        for name in ("before", "after"):
            lines += [
                f"**{name.capitalize()}**",
                "",
                *(f"    {plain(line)}" for line in pair[name].splitlines() or [""]),
                "",
            ]
    return "\n".join(lines)


def _quiet(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", " ".join(text.split()))


def _answers(context: Context, asked: Sequence[list[Message]], folder: Any) -> list[str]:
    wish = context.recipe.compare
    answerer = Answerer(folder, wish.max_new_tokens, wish.temperature, context.recipe.seed)
    return answerer.answer(asked)
