"""An answer comes in pieces as it is made, and is the answer that would have come whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelwright.data.conversations import ask
from modelwright.errors import UsageError
from modelwright.serve.ask import Answerer, Decoding

QUESTIONS = ["Why?", "How do I dry wet boots after a long day?", "Wie weit ist es bis München, 森?"]


@pytest.fixture(scope="module")
def answerer(loud_model: Path) -> Answerer:
    """A model whose answers are long and differ."""
    return Answerer(loud_model, max_new_tokens=24)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_pieces_are_the_whole_answer(answerer: Answerer, question: str) -> None:
    messages = ask(question, "Be brief.")
    pieces = list(answerer.reply(messages))
    assert "".join(pieces) == answerer.answer([messages])[0]
    assert len(pieces) > 1


def test_drawn_answers_are_the_same_for_the_same_seed_and_others_for_another(answerer: Answerer) -> None:
    said = ["".join(answerer.reply(ask("Why?", None), Decoding(24, 1.5, seed=seed))) for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_a_narrow_top_p_is_the_likeliest_token(answerer: Answerer) -> None:
    narrow = "".join(answerer.reply(ask("Why?", None), Decoding(24, 1.0, top_p=1e-6)))
    assert narrow == answerer.answer([ask("Why?", None)])[0]


def test_a_stop_text_ends_the_answer_and_is_not_in_it(answerer: Answerer) -> None:
    whole = "".join(answerer.reply(ask("Why?", None)))
    stop = whole[5:8]
    reply = answerer.reply(ask("Why?", None), Decoding(24, stop=(stop,)))
    assert "".join(reply) == whole[: whole.index(stop)].rstrip()
    assert reply.finish == "stop"


def test_a_reply_knows_how_it_ended_and_what_it_took(answerer: Answerer) -> None:
    reply = answerer.reply(ask("Why?", None), Decoding(3))
    list(reply)
    assert (reply.finish, reply.tokens) == ("length", 3)
    assert reply.prompt_tokens == len(answerer._encode([ask("Why?", None)])["input_ids"][0])


def test_the_token_that_ends_an_answer_is_not_part_of_it(answerer: Answerer) -> None:
    first = int(answerer._model(**answerer._encode([ask("Why?", None)])).logits[0, -1].argmax())
    stops, answerer._stops = answerer._stops, [first]
    try:
        reply = answerer.reply(ask("Why?", None))
        assert list(reply) == []
        assert (reply.finish, reply.tokens) == ("stop", 0)
    finally:
        answerer._stops = stops


def test_a_conversation_without_room_for_an_answer_is_told(answerer: Answerer) -> None:
    with pytest.raises(UsageError, match=r"takes \d+ tokens and the model has room for 256; shorten it"):
        answerer.reply(ask("word " * 300, None))


def test_an_answer_ends_where_the_room_does(answerer: Answerer) -> None:
    messages = ask("a b c d " * 10, None)
    length = answerer.reply(messages).prompt_tokens
    reply = answerer.reply(messages, Decoding(1000))
    list(reply)
    assert reply.tokens <= 256 - length
