"""Answer the same prompts with the model before and after training, and measure style, length and answer F1."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import xxhash

from modelwright.data.chat import Message, build_prompt_messages
from modelwright.errors import UsageError
from modelwright.models import pretrained
from modelwright.recipe.load import load
from modelwright.report.formatting import single_line
from modelwright.runs.folder import RunFolder, read_json, write_json, write_text
from modelwright.serve.generate import TextGenerator
from modelwright.stages.context import RunContext, StageInputs

NOTICE = "These answers show what training changed; they are a demonstration and no advice."
ANSWER_METRICS = ("style_score", "base_style_score", "answer_words", "base_answer_words", "answer_f1", "base_answer_f1")
WORD = re.compile(r"\w+")


def compare_answers(context: RunContext, inputs: StageInputs, stage: str) -> dict[str, float | None]:
    """Write demo_outputs and return its metrics; answers that stand already for these models are kept."""
    config = context.recipe.compare
    questions, system_prompt = select_prompts(context, inputs), context.recipe.data_for(stage).system_prompt
    if not questions:
        return {}
    result = read_json(context.folder.result(stage))
    key = xxhash.xxh3_128_hexdigest(
        repr([inputs.model_fingerprint, result["files"], questions, config.model_dump()]).encode()
    )
    path = context.folder.demo_outputs / "before_after.json"
    comparison = read_json(path) if path.exists() else {}
    cached = comparison.get("key") == key
    if not cached:
        context.journal.add("sampling", stage=stage, questions=len(questions))
        conversations = [build_prompt_messages(question, system_prompt) for question in questions]
        before = _generate_answers(context, conversations, inputs.model.path)
        after = _generate_answers(context, conversations, context.folder.model(stage))
        pairs = [{"question": q, "before": b, "after": a} for q, b, a in zip(questions, before, after, strict=True)]
        references_by_prompt = reference_answers(inputs)
        pairs = [
            {**pair, "reference": references_by_prompt[q]} if (q := pair["question"]) in references_by_prompt else pair
            for pair in pairs
        ]
        comparison = {"key": key, "notice": NOTICE, "system_prompt": system_prompt,
                "metrics": answer_metrics(pairs, config.style_patterns), "answers": pairs}  # fmt: skip
        write_json(path, comparison)
        write_text(path.with_suffix(".md"), as_markdown(comparison))
    context.journal.add(
        "answers", stage=stage, cached=cached, **{name: comparison[name] for name in ("metrics", "answers", "notice")}
    )
    metrics: dict[str, float | None] = comparison["metrics"]
    return metrics


def select_prompts(context: RunContext, inputs: StageInputs) -> list[str]:
    """The recipe's questions, then held-out ones that the model never trained on."""
    config = context.recipe.compare
    held_out = [item.last_user_message for item in inputs.data.held_out if len(item.messages) <= 3]
    return [*config.prompts, *dict.fromkeys(held_out)][: len(config.prompts) + config.num_held_out_prompts]


def reference_answers(inputs: StageInputs) -> dict[str, str]:
    """The answers that the held-out questions have in the data, by question."""
    return {
        item.last_user_message: item.messages[-1]["content"]
        for item in inputs.data.held_out
        if item.messages[-1]["role"] == "assistant"
    }


def answer_metrics(pairs: Sequence[dict[str, str]], style_patterns: Sequence[str]) -> dict[str, float | None]:
    """The voice and the length of the answers, before and after, and how near they come to the data's own."""
    before, after = [pair["before"] for pair in pairs], [pair["after"] for pair in pairs]
    with_reference = [pair for pair in pairs if "reference" in pair]
    f1_scores: dict[str, float | None] = {
        name: round(mean(answer_f1(pair[key], pair["reference"]) for pair in with_reference), 4)
        for name, key in (("base_answer_f1", "before"), ("answer_f1", "after"))
        if with_reference
    }
    return {
        **f1_scores,
        "base_style_score": style_score(before, style_patterns),
        "style_score": style_score(after, style_patterns),
        "base_answer_words": round(mean(len(answer.split()) for answer in before), 1),
        "answer_words": round(mean(len(answer.split()) for answer in after), 1),
    }


def answer_f1(answer: str, reference: str) -> float:
    """How much of two answers is the same, word for word in any order: F1 of their words, from 0 to 1."""
    answer_words, reference_words = (Counter(WORD.findall(text.lower())) for text in (answer, reference))
    common = (answer_words & reference_words).total()
    return 2 * common / (answer_words.total() + reference_words.total()) if common else 0.0


def style_score(answers: Sequence[str], style_patterns: Sequence[str]) -> float | None:
    """The mean share of the voice's patterns found in an answer; None where no voice is described."""
    if not style_patterns:
        return None
    patterns = [re.compile(pattern, re.DOTALL) for pattern in style_patterns]
    return round(mean(mean(bool(pattern.search(answer)) for pattern in patterns) for answer in answers), 4)


def as_markdown(comparison: dict[str, Any]) -> str:
    """The comparison as a page; model text is quoted, so that nothing in it acts as markup."""
    lines = ["# Before and after", "", f"> {comparison['notice']}", ""]
    for pair in comparison["answers"]:
        lines += [f"## {_escape_markdown(pair['question'])}", ""]
        for name in ("before", "after"):
            lines += [
                f"**{name.capitalize()}**",
                "",
                *(f"    {single_line(line)}" for line in pair[name].splitlines() or [""]),
                "",
            ]
    return "\n".join(lines)


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", " ".join(text.split()))


def _generate_answers(context: RunContext, conversations: Sequence[list[Message]], model_dir: Any) -> list[str]:
    config = context.recipe.compare
    generator = TextGenerator(model_dir, config.max_new_tokens, config.temperature, context.recipe.seed)
    return generator.generate(conversations)


class RunModels:
    """The models of one run, each loaded when it is first asked."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.recipe = load(folder.recipe, environ={}).recipe
        if "classify" in self.recipe.stages:
            raise UsageError(f"{folder.path} trained an image classifier, which answers no questions")
        self.system_prompt = self.recipe.data_for(list(self.recipe.stages)[-1]).system_prompt
        self._loaded: dict[str, TextGenerator] = {}

    def generator(self, who: str) -> TextGenerator:
        """The model `before` training, or `after`."""
        if who not in self._loaded:
            config = self.recipe.compare
            path = self.base_model_dir() if who == "before" else self.promoted_model_dir()
            self._loaded[who] = TextGenerator(path, config.max_new_tokens, config.temperature, self.recipe.seed)
        return self._loaded[who]

    def messages(self, question: str) -> list[Message]:
        """A question as the model was trained to meet it."""
        return list(build_prompt_messages(question, self.system_prompt))

    def stream_both(self, question: str) -> Iterator[tuple[str, str]]:
        """Pieces of both answers in turn, each with who says it."""
        streams = {who: iter(self.generator(who).stream(self.messages(question))) for who in ("before", "after")}
        while streams:
            for who in list(streams):
                piece = next(streams[who], None)
                if piece is None:
                    del streams[who]
                else:
                    yield who, piece

    def base_model_dir(self) -> Path:
        if self.recipe.model.architecture:
            return self.folder.model("init")
        return pretrained.resolve_model(self.recipe.model, self.folder.path).path

    def promoted_model_dir(self) -> Path:
        """The promoted model; where no gate has opened yet, the last one trained."""
        models = [self.folder.model(stage) for stage in self.recipe.stages]
        for folder in (self.folder.best_model, *reversed(models)):
            if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
                return folder
        raise UsageError(f"{self.folder.path} has no trained model yet; finish it with: modelwright run")
