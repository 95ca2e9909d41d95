"""`coordinator chat` over a server that is played: what is asked, and what its own commands do."""

import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lamina.coordinator.cli.app import app
from lamina.coordinator.cli.chat import ChatSettings, chat
from lamina.coordinator.cli.client import ServerClient
from lamina.spec.errors import LaminaError

TIMINGS = {"prompt_n": 7, "cache_n": 5, "prompt_ms": 12.3, "predicted_n": 3, "predicted_per_second": 45.6}


class Server:
    """Answers every question with its number, in two pieces; one that says `fail` with an error."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    def get(self, path: str) -> dict[str, Any]:
        return {"data": [{"id": "m", "max_model_len": 4096}]}

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append([(message["role"], message["content"]) for message in body["messages"]])
        if body["messages"][-1]["content"] == "fail":
            raise LaminaError("the prompt has 4100 tokens, the context here is 4096")
        for piece in ("answer ", str(len(self.asked))):
            yield {"choices": [{"delta": {"content": piece}}]}
        yield {"choices": [], "timings": TIMINGS}


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str = "") -> Server:
    server, left = Server(), [*lines]

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("builtins.input", read)
    chat(cast(ServerClient, server), ChatSettings(system, 0.0, None))
    assert not left or any(line in ("/quit", "/exit") for line in lines)
    return server


def test_a_conversation_grows_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("/reset", "/clear"):
        server = talk(monkeypatch, "a", " b ", "", word, "c", system="be brief")
        system = ("system", "be brief")
        assert server.asked == [
            [system, ("user", "a")],
            [system, ("user", "a"), ("assistant", "answer 1"), ("user", "b")],
            [system, ("user", "c")],
        ]
        assert capsys.readouterr() == ("answer 1\nanswer 2\nanswer 3\n", "")


def test_another_system_message_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    server = talk(monkeypatch, "a", "/system  speak like a pirate", "b", "/system", "c")
    first, second, third = server.asked
    assert first == [("user", "a")]
    assert second == [("system", "speak like a pirate"), *first, ("assistant", "answer 1"), ("user", "b")]
    assert third == [*second[1:], ("assistant", "answer 2"), ("user", "c")]


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_the_words_that_leave(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    assert len(talk(monkeypatch, "a", word, "b").asked) == 1


def test_a_terminal_is_greeted_and_left_on_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    talk(monkeypatch, "a")
    told = capsys.readouterr()
    assert told.out == "answer 1\n"
    greeting, timings, *rest = told.err.split("\n")
    assert greeting.startswith("m. /help lists what else")
    assert timings == "[7 prompt tokens (5 cached) in 12 ms, 3 tokens at 45.6/s]"
    assert rest == ["", ""]


def test_help_and_what_it_does_not_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = talk(monkeypatch, "/help")
    told = capsys.readouterr().err
    assert all(f"{word} " in told for word in ("/reset", "/system", "/stats", "/help", "/quit"))
    assert not talk(monkeypatch, "/rest", "/sytem be brief", "/").asked
    lines = [f"there is no {word}; /help lists what there is" for word in ("/rest", "/sytem", "/")]
    assert capsys.readouterr() == ("", "\n".join([*lines, ""]))
    server = talk(monkeypatch, "/etc/hosts is what?")
    assert server.asked == [[("user", "/etc/hosts is what?")]], "a path is no command"


def test_stats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk(monkeypatch, "/stats", "a", "/stats", "/reset", "/stats")
    assert capsys.readouterr().err.splitlines() == [
        "no answer to tell of",
        "2 messages, 15 of 4096 tokens of context; the last answer: 7 prompt tokens (5 cached) in 12 ms, 3 tokens at"
        " 45.6/s",
        "no answer to tell of",
    ]


def test_a_question_that_fails_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = talk(monkeypatch, "a", "fail", "b")
    assert server.asked[2] == [("user", "a"), ("assistant", "answer 1"), ("user", "b")]
    assert "the prompt has 4100 tokens, the context here is 4096" in capsys.readouterr().err


@pytest.mark.parametrize(("lines", "code"), [("a\nfail\nb\n", 1), ("a\nb\n", 0), ("", 0)])
def test_a_script_hears_of_a_question_that_failed(monkeypatch: pytest.MonkeyPatch, lines: str, code: int) -> None:
    """By the exit code, once all lines have been asked; on a terminal who asks has seen it."""
    server = Server()
    monkeypatch.setattr("lamina.coordinator.cli.server_commands.ServerClient", lambda *_: server)
    result = CliRunner().invoke(app, ["chat"], input=lines)
    assert (result.exit_code, len(server.asked)) == (code, len(lines.splitlines()))


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_a_standard_stream_that_is_closed(monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    """As by `<&-`, where Python has None: nobody asks, or nobody would read the answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    monkeypatch.setattr(sys, closed, None)
    server = Server()
    chat(cast(ServerClient, server), ChatSettings("", 0.0, None))
    assert server.asked == []


def test_what_is_no_text_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another encoding than the terminal says, in and out."""
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, "ascii"))
    server = Server()
    chat(cast(ServerClient, server), ChatSettings("", 0.0, None))
    assert server.asked == [[("user", "caf\ufffd")]]
