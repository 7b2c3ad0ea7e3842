"""A chat has commands of its own: help, a new conversation, another system prompt, and what was said."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from modelwright.cli import model


class Echo:
    """Answers with the roles it was given."""

    def stream(self, messages: list[dict[str, str]]) -> Any:
        class Reply(list[str]):
            finish_reason = "stop"

        return Reply([" ".join(message["role"] for message in messages)])


def talk(lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is printed when these lines are typed."""
    start = [{"role": "system", "content": "Be brief."}]
    models = SimpleNamespace(
        recipe=SimpleNamespace(name="tiny"), generator=lambda who: Echo(), messages=lambda text: [*start, {}]
    )
    monkeypatch.setattr(model, "_open_models", lambda run: models)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    model.chat("run")
    return capsys.readouterr().out.split("> ")


def test_a_chat_begins_with_a_banner_and_lists_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    banner, listed, unknown, _ = talk("/help\n/nope\n/quit\n", monkeypatch, capsys)
    assert banner == "tiny, after training; /help lists the commands, /quit ends\n"
    assert all(command in listed for command in ("/reset", "/system TEXT", "/history", "/quit"))
    assert unknown == "there is no command /nope; /help lists them\n"


def test_an_empty_line_is_no_message_and_the_end_of_the_input_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("\nHi\n", monkeypatch, capsys)[1:] == ["", "system user\n", "\n"]


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Echo, messages: list[dict[str, str]]) -> Any:
        yield "I was"
        raise KeyboardInterrupt

    monkeypatch.setattr(Echo, "stream", interrupted)
    _, answer, history, _ = talk("Hi\n/history\n", monkeypatch, capsys)
    assert answer == "I was … stopped\n" and history.endswith("assistant: I was\n")


def test_a_conversation_goes_on_and_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "Hi\nAgain\n/history\n/reset\nHi\n/system Shout.\n/system\nHi\n"
    _, first, second, history, reset, third, changed, prompt, fourth, _ = talk(lines, monkeypatch, capsys)
    assert (first, second) == ("system user\n", "system user assistant user\n")
    assert history.splitlines()[:3] == ["system: Be brief.", "user: Hi", "assistant: system user"]
    assert (reset, third) == ("new conversation\n", "system user\n")
    assert changed.startswith("new conversation") and (prompt, fourth) == ("system: Shout.\n", "system user\n")
