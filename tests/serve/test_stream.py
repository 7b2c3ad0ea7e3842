"""A streamed answer comes in pieces that together equal the answer generated at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelwright.data.chat import build_prompt_messages
from modelwright.errors import UsageError
from modelwright.serve.generate import TextGenerator
from modelwright.serve.sampling import SamplingParams

QUESTIONS = ["Why?", "How do I dry wet boots after a long day?", "Wie weit ist es bis München, 森?"]


@pytest.fixture(scope="module")
def answerer(loud_model: Path) -> TextGenerator:
    """A model whose answers are long and differ."""
    return TextGenerator(loud_model, max_new_tokens=24)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_pieces_are_the_whole_answer(answerer: TextGenerator, question: str) -> None:
    messages = build_prompt_messages(question, "Be brief.")
    pieces = list(answerer.stream(messages))
    assert "".join(pieces) == answerer.generate([messages])[0]
    assert len(pieces) > 1


def test_drawn_answers_are_the_same_for_the_same_seed_and_others_for_another(answerer: TextGenerator) -> None:
    answers = [
        "".join(answerer.stream(build_prompt_messages("Why?", None), SamplingParams(24, 1.5, seed=seed)))
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_narrow_top_p_is_the_likeliest_token(answerer: TextGenerator) -> None:
    narrow = "".join(answerer.stream(build_prompt_messages("Why?", None), SamplingParams(24, 1.0, top_p=1e-6)))
    assert narrow == answerer.generate([build_prompt_messages("Why?", None)])[0]


def test_a_stop_text_ends_the_answer_and_is_not_in_it(answerer: TextGenerator) -> None:
    full_answer = "".join(answerer.stream(build_prompt_messages("Why?", None)))
    stop = full_answer[5:8]
    reply = answerer.stream(build_prompt_messages("Why?", None), SamplingParams(24, stop=(stop,)))
    assert "".join(reply) == full_answer[: full_answer.index(stop)].rstrip()
    assert reply.finish_reason == "stop"


def test_a_reply_knows_how_it_ended_and_what_it_took(answerer: TextGenerator) -> None:
    reply = answerer.stream(build_prompt_messages("Why?", None), SamplingParams(3))
    list(reply)
    assert (reply.finish_reason, reply.completion_tokens) == ("length", 3)
    assert reply.prompt_tokens == len(answerer._tokenize(build_prompt_messages("Why?", None)))


def test_the_token_that_ends_an_answer_is_not_part_of_it(answerer: TextGenerator) -> None:
    prompt = torch.tensor([answerer._tokenize(build_prompt_messages("Why?", None))])
    first = int(answerer._model(prompt).logits[0, -1].argmax())
    stops, answerer._eos_token_ids = answerer._eos_token_ids, [first]
    try:
        reply = answerer.stream(build_prompt_messages("Why?", None))
        assert list(reply) == []
        assert (reply.finish_reason, reply.completion_tokens) == ("stop", 0)
    finally:
        answerer._eos_token_ids = stops


def test_a_conversation_without_room_for_an_answer_is_reported(answerer: TextGenerator) -> None:
    with pytest.raises(UsageError, match=r"takes \d+ tokens and the model's context length is 256; shorten it"):
        answerer.stream(build_prompt_messages("word " * 300, None))


def test_an_answer_ends_where_the_room_does(answerer: TextGenerator) -> None:
    messages = build_prompt_messages("a b c d " * 10, None)
    length = answerer.stream(messages).prompt_tokens
    reply = answerer.stream(messages, SamplingParams(1000))
    list(reply)
    assert reply.completion_tokens <= 256 - length
