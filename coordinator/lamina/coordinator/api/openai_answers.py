"""GenerationEvents to OpenAI's answers: whole JSON documents, and server-sent events written by hand.

An event of a stream is a constant head, the delta as a JSON string, and a constant tail: no object is built and no
serialiser runs per token. Knows no HTTP beyond the bytes of a body.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quote

from lamina.coordinator.api.errors import ApiError, error_object
from lamina.coordinator.api.generation import ChoiceStats, Delta, Finished, TokenLogprob, ToolCall

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of an answer repeats."""

    id: str
    model: str
    created_s: int
    token_bytes: TokenBytes
    num_choices: int = 1  # per prompt
    num_prompts: int = 1
    prompt_texts: tuple[str, ...] = ()  # with `echo`, one per prompt


def usage(stats: Sequence[ChoiceStats], num_choices: int) -> dict[str, object]:
    """OpenAI's usage object; the prompt of several choices counts once."""
    firsts = stats[::num_choices]
    num_prompt = sum(choice.num_prompt_tokens for choice in firsts)
    num_generated = sum(choice.num_tokens for choice in stats)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
    }


def timings(stats: Sequence[ChoiceStats], num_choices: int) -> dict[str, object]:
    """llama-server's timings: the first token belongs to the prompt's time, choices count side by side."""
    firsts = stats[::num_choices]
    num_cached = sum(choice.num_cached_tokens for choice in firsts)
    num_prompt = sum(choice.num_prompt_tokens for choice in firsts) - num_cached
    num_predicted = sum(choice.num_tokens for choice in stats)
    prompt_ms = 1000 * max((choice.prefill_s or 0.0 for choice in stats), default=0.0)
    predicted_ms = 1000 * max((choice.decode_s or 0.0 for choice in stats), default=0.0)
    return {
        "cache_n": num_cached,
        "prompt_n": num_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / num_prompt if num_prompt else 0.0,
        "prompt_per_second": 1000 * num_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / num_predicted if num_predicted else 0.0,
        "predicted_per_second": 1000 * num_predicted / predicted_ms if predicted_ms else 0.0,
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob], token_bytes: TokenBytes) -> list[dict[str, object]]:
    """The `content` of a chat choice's logprobs."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        data = token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return [
        {**entry(item.token, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]} for item in logprobs
    ]


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int
) -> dict[str, list[object]]:
    """The logprobs of a text completion; `offset` is where its first token begins in the text."""
    tokens = [token_bytes(item.token).decode("utf-8", "replace") for item in logprobs]
    offsets: list[object] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [{token_bytes(t).decode("utf-8", "replace"): value for t, value in item.top} for item in logprobs]
    return {
        "tokens": [*tokens],
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": [*tops],
        "text_offset": offsets,
    }


def _call_object(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(slots=True)
class _Collected:
    """One choice of an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    end: Finished | None = None


class WholeAnswer:
    """Collects events into one document."""

    def __init__(self, head: AnswerHead, *, chat: bool, with_logprobs: bool) -> None:
        self._head = head
        self._chat = chat
        self._with_logprobs = with_logprobs
        self._choices: dict[int, _Collected] = {}

    def add(self, event: Delta | Finished) -> None:
        """Take the next event."""
        choice = self._choices.setdefault(event.choice, _Collected())
        if isinstance(event, Finished):
            choice.end = event
            return
        choice.texts.append(event.text)
        choice.logprobs += event.logprobs
        choice.calls += event.tool_calls
        choice.thoughts.append(event.reasoning)

    def body(self) -> bytes:
        """The document, once every choice has finished."""
        head, kind = self._head, "chat.completion" if self._chat else "text_completion"
        ordered = sorted(self._choices.items())
        stats = [choice.end.stats for _, choice in ordered if choice.end is not None]
        document = {
            "id": head.id,
            "object": kind,
            "created": head.created_s,
            "model": head.model,
            "choices": [self._choice(index, choice) for index, choice in ordered],
            "usage": usage(stats, head.num_choices),
            "timings": timings(stats, head.num_choices),
        }
        return json.dumps(document).encode()

    def _choice(self, index: int, choice: _Collected) -> dict[str, object]:
        text = "".join(choice.texts)
        end = choice.end
        common: dict[str, object] = {
            "index": index,
            "finish_reason": end.reason if end else None,
            "stop_reason": end.stop if end else None,
            "logprobs": None,
        }
        if not self._chat:
            prompt = self._head.prompt_texts[index // self._head.num_choices] if self._head.prompt_texts else ""
            if self._with_logprobs:
                common["logprobs"] = completion_logprobs(choice.logprobs, self._head.token_bytes, 0)
            return {**common, "text": prompt + text}
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if thoughts := "".join(choice.thoughts):
            message["reasoning_content"] = thoughts
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call_object(call) for call in choice.calls]
        if self._with_logprobs:
            common["logprobs"] = {"content": chat_logprobs(choice.logprobs, self._head.token_bytes), "refusal": None}
        return {**common, "message": message}


class EventWriter:
    """Writes the events of a stream: `first`, then `delta` and `end` for what comes, then `last`."""

    def __init__(self, head: AnswerHead, *, chat: bool, include_usage: bool) -> None:
        self._head = head
        self._chat = chat
        self._include_usage = include_usage
        self._stats: dict[int, ChoiceStats] = {}
        self._num_calls: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        constant = {
            "id": head.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": head.created_s,
            "model": head.model,
        }
        null_usage = ',"usage":null' if include_usage else ""
        self._open = f"data: {json.dumps(constant, separators=(',', ':'))[:-1]}{null_usage},"
        before = ',"delta":{"content":' if chat else ',"text":'
        self._text_heads = [f'{self._open}"choices":[{{"index":{i}{before}' for i in range(self._num_all_choices)]
        self._text_tail = ("}" if chat else "") + ',"logprobs":null,"finish_reason":null}]}\n\n'

    @property
    def _num_all_choices(self) -> int:
        return self._head.num_choices * self._head.num_prompts

    def first(self) -> bytes:
        """The roles of a chat; the prompts of text completions with `echo`, else b""."""
        if self._chat:
            delta = {"delta": {"role": "assistant", "content": ""}}
            return b"".join(self._event({"index": i, **delta}) for i in range(self._num_all_choices))
        num_choices = self._head.num_choices
        return b"".join(
            self._event({"index": prompt * num_choices + i, "text": text})
            for prompt, text in enumerate(self._head.prompt_texts)
            for i in range(num_choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """One more piece of a choice."""
        if not delta.logprobs and not delta.tool_calls and not delta.reasoning:
            return (self._text_heads[delta.choice] + _quote(delta.text) + self._text_tail).encode("ascii")
        choice: dict[str, object] = {"index": delta.choice}
        if not self._chat:
            offset = self._offsets.get(delta.choice, 0)
            logprobs = completion_logprobs(delta.logprobs, self._head.token_bytes, offset)
            self._offsets[delta.choice] = offset + sum(len(str(token)) for token in logprobs["tokens"])
            return self._event({**choice, "text": delta.text, "logprobs": logprobs})
        has_other = delta.tool_calls or delta.reasoning
        content: dict[str, object] = {"content": delta.text} if delta.text or not has_other else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            start = self._num_calls.get(delta.choice, 0)
            self._num_calls[delta.choice] = start + len(delta.tool_calls)
            content["tool_calls"] = [
                {"index": start + i, **_call_object(call)} for i, call in enumerate(delta.tool_calls)
            ]
        if delta.logprobs:
            choice["logprobs"] = {"content": chat_logprobs(delta.logprobs, self._head.token_bytes), "refusal": None}
        return self._event({**choice, "delta": content})

    def end(self, end: Finished) -> bytes:
        """The end of a choice; that of the last choice carries the timings, unless usage follows."""
        self._stats[end.choice] = end.stats
        empty: dict[str, object] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": end.choice, **empty, "finish_reason": end.reason, "stop_reason": end.stop}
        if self._include_usage or len(self._stats) < self._num_all_choices:
            return self._event(choice)
        return self._event(choice, {"timings": timings(self._ordered_stats(), self._head.num_choices)})

    def last(self) -> bytes:
        """Usage if it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        stats = self._ordered_stats()
        summary = {
            "choices": [],
            "usage": usage(stats, self._head.num_choices),
            "timings": timings(stats, self._head.num_choices),
        }
        opening = self._open.replace(',"usage":null', "")
        return f"{opening}{json.dumps(summary)[1:]}\n\n".encode() + DONE

    def _ordered_stats(self) -> list[ChoiceStats]:
        return [self._stats[choice] for choice in sorted(self._stats)]

    def _event(self, choice: dict[str, object], more: dict[str, object] | None = None) -> bytes:
        choice = {"logprobs": None, "finish_reason": None, **choice}
        return f"{self._open}{json.dumps({'choices': [choice], **(more or {})})[1:]}\n\n".encode()


def failure_event(error: ApiError) -> bytes:
    """An error in the midst of a stream; nothing follows it."""
    return f"data: {json.dumps(error_object(error))}\n\n".encode()
