"""`coordinator chat`: a conversation with a running server on the terminal."""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lamina.coordinator.cli.client import ServerClient
from lamina.coordinator.cli.options import take_any_text
from lamina.spec.errors import LaminaError

_HELP = """\
/reset        forget the conversation (also /clear)
/system TEXT  another system message from the next answer on; none without TEXT
/stats        how much of the context the conversation takes, and how fast the last answer was
/help         this list
/quit         leave (also /exit and Ctrl-D); Ctrl-C stops an answer"""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are made."""

    system: str
    temperature: float
    max_tokens: int | None


def chat(client: ServerClient, settings: ChatSettings) -> bool:
    """Until the input ends; whether every question was answered. Raises Unavailable if the server does not answer."""
    conversation = _Conversation(client, settings, client.get("/v1/models")["data"][0])
    take_any_text()
    is_interactive = sys.stdin is not None and sys.stdin.isatty()
    if is_interactive:
        _say(f"{conversation.model['id']}. /help lists what else may be typed; Ctrl-D leaves, Ctrl-C stops an answer.")
        with suppress(ImportError):
            import readline  # noqa: F401 (arrow keys and a history for input())
    all_answered = True
    while (line := _read_line(is_interactive)) not in (None, "/exit", "/quit"):
        if line and re.match(r"/[a-z]*(\s|$)", line):  # what has a further slash is a path, which is text
            conversation.obey(line)
        elif line:
            all_answered &= conversation.ask(line, with_timings=is_interactive)
    return all_answered or is_interactive  # who sits there has seen it


def _say(text: str) -> None:
    """What is no answer."""
    print(text, file=sys.stderr)


def _read_line(is_interactive: bool) -> str | None:
    try:
        return input("> " if is_interactive else "").strip()
    except (EOFError, RuntimeError):  # the latter where a standard stream was closed before the start
        if is_interactive:
            _say("")  # the shell's prompt has a line of its own
        return None


class _Conversation:
    """The messages so far, and what the last answer took."""

    def __init__(self, client: ServerClient, settings: ChatSettings, model: dict[str, Any]) -> None:
        self.model = model
        self._client = client
        self._settings = settings
        self._system = settings.system
        self._messages: list[dict[str, str]] = []  # without the system's
        self._timings: dict[str, float] = {}

    def obey(self, line: str) -> None:
        """A line that begins with a slash."""
        word, _, text = line.partition(" ")
        match word:
            case "/help":
                _say(_HELP)
            case "/reset" | "/clear":
                self._messages, self._timings = [], {}
            case "/system":
                self._system = text.strip()
            case "/stats":
                _say(self._stats())
            case _:
                _say(f"there is no {word}; /help lists what there is")

    def ask(self, question: str, *, with_timings: bool) -> bool:
        """Print the answer as it comes and add it to the conversation; a failed one takes its question back: False."""
        self._messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            self._stream(pieces)
        except KeyboardInterrupt:  # the server notices that we are gone
            print(" [stopped]", end="")
        except LaminaError as error:
            self._messages.pop()
            _say(f"\n{error}")
            return False
        print(flush=True)
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        if with_timings and self._timings:
            _say(f"[{_timing_line(self._timings)}]")
        return True

    def _stream(self, pieces: list[str]) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body: dict[str, Any] = {
            "messages": system + self._messages,
            "stream": True,
            "temperature": self._settings.temperature,
        }
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        is_thinking = False
        self._timings = {}
        for event in self._client.stream("/v1/chat/completions", body):
            self._timings = event.get("timings", self._timings)
            for choice in event["choices"]:
                if thought := choice["delta"].get("reasoning_content"):
                    print(thought, end="", file=sys.stderr, flush=True)  # no part of the answer, nor of the history
                    is_thinking = True
                piece = choice["delta"].get("content") or ""
                if piece and is_thinking:
                    print("\n", file=sys.stderr, flush=True)
                    is_thinking = False
                pieces.append(piece)
                print(piece, end="", flush=True)

    def _stats(self) -> str:
        timings = self._timings
        if not timings:
            return "no answer to tell of"
        num_tokens = timings["prompt_n"] + timings["cache_n"] + timings["predicted_n"]
        context = f"{num_tokens} of {self.model['max_model_len']} tokens of context"
        return f"{len(self._messages)} messages, {context}; the last answer: {_timing_line(timings)}"


def _timing_line(timings: dict[str, float]) -> str:
    return (
        f"{timings['prompt_n']} prompt tokens ({timings['cache_n']} cached) in {timings['prompt_ms']:.0f} ms,"
        f" {timings['predicted_n']} tokens at {timings['predicted_per_second']:.1f}/s"
    )
