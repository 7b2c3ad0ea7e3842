"""A model is asked in the words it was trained with, alone or in company, and answers the same each time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modelwright.data.conversations import ask
from modelwright.errors import UsageError
from modelwright.models.text import load_tokenizer
from modelwright.serve.ask import Answerer

QUESTIONS = [
    ask("Why?", None),
    ask("How do I dry wet boots after a long day of walking?", "Be brief."),
    ask("When?", None),
]


def test_a_question_in_company_gets_the_answer_it_gets_alone(loud_model: Path) -> None:
    answerer = Answerer(loud_model, max_new_tokens=12)
    together = answerer.answer(QUESTIONS)
    assert together == [answerer.answer([question])[0] for question in QUESTIONS]
    assert len(set(together)) == 3


def test_the_same_question_gets_the_same_answer_sampled_or_not(loud_model: Path) -> None:
    for temperature in (0.0, 1.0):
        answers = [Answerer(loud_model, 8, temperature, seed=5).answer(QUESTIONS[:1]) for _ in range(2)]
        assert answers[0] == answers[1]


def test_another_seed_samples_another_answer(loud_model: Path) -> None:
    answers = {Answerer(loud_model, 12, temperature=1.5, seed=seed).answer(QUESTIONS[:1])[0] for seed in range(3)}
    assert len(answers) > 1


def test_a_model_is_asked_with_exactly_the_tokens_it_was_trained_on(loud_model: Path) -> None:
    from modelwright.data.chat import encode
    from modelwright.data.conversations import Conversation

    tokenizer = load_tokenizer(loud_model)
    messages = (*ask("Why?", "Be brief."), {"role": "assistant", "content": "So."})
    [row] = encode(Conversation("x", messages, "why?"), tokenizer)
    asked = Answerer(loud_model)._encode([ask("Why?", "Be brief.")])["input_ids"][0]
    assert asked.tolist() == row.tokens[~row.trained].tolist()


def test_a_model_without_a_chat_template_is_asked_plainly(loud_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(loud_model, tmp_path / "plain")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    assert len(Answerer(folder, max_new_tokens=4).answer([ask("Why?", None)])) == 1


def test_a_template_that_makes_nothing_of_a_question_is_told(loud_model: Path) -> None:
    answerer = Answerer(loud_model)
    answerer._tokenizer.chat_template = "{{ messages[0].nothing }}"
    with pytest.raises(UsageError, match="makes no word of these turns, so there is nothing to answer"):
        answerer.reply(QUESTIONS[0])
