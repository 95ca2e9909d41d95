"""`coordinator chat`: a conversation with a running server on the terminal."""

import sys
from dataclasses import dataclass
from typing import Any

from lamina.coordinator.cli.client import ServerClient
from lamina.spec.errors import LaminaError

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are made."""

    system: str
    temperature: float
    max_tokens: int | None


def chat(client: ServerClient, settings: ChatSettings) -> None:
    """Until the input ends. Raises Unavailable if the server does not answer."""
    model = client.get("/v1/models")["data"][0]["id"]
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        print(f"{model}. {_HELP}", file=sys.stderr)
    opening: list[dict[str, str]] = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = list(opening)
    while (line := _read_line(is_interactive)) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            _answer(client, settings, messages)


def _read_line(is_interactive: bool) -> str | None:
    try:
        return input("> " if is_interactive else "").strip()
    except EOFError:
        return None


def _answer(client: ServerClient, settings: ChatSettings, messages: list[dict[str, str]]) -> None:
    """Print the answer as it comes and add it to the conversation; a failed one takes its question back."""
    body: dict[str, Any] = {"messages": messages, "stream": True, "temperature": settings.temperature}
    if settings.max_tokens is not None:
        body["max_tokens"] = settings.max_tokens
    pieces: list[str] = []
    is_thinking = False
    timings: dict[str, float] = {}
    try:
        for event in client.stream("/v1/chat/completions", body):
            timings = event.get("timings", timings)
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
    except KeyboardInterrupt:  # the server notices that we are gone
        print(" [stopped]", end="")
    except LaminaError as error:
        messages.pop()
        print(f"\n{error}", file=sys.stderr)
        return
    print(flush=True)
    messages.append({"role": "assistant", "content": "".join(pieces)})
    if timings and sys.stdin.isatty():
        print(_timing_line(timings), file=sys.stderr)


def _timing_line(timings: dict[str, float]) -> str:
    return (
        f"[{timings['prompt_n']} prompt tokens ({timings['cache_n']} cached) in {timings['prompt_ms']:.0f} ms,"
        f" {timings['predicted_n']} tokens at {timings['predicted_per_second']:.1f}/s]"
    )
