"""A lean load generator for the HTTP API: raw asyncio protocols that count server-sent events as they come.

It parses no JSON while it measures, so that on a small machine the server is what is measured. Standard library only.

    python benchmarks/load.py       commands on standard input, answers on standard output
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from contest import random_ids, serve_commands


@dataclass(slots=True)
class Answer:
    """What one request saw. `times` has one entry per event with text in it; usage is the server's own count."""

    sent_s: float = 0.0
    times: list[float] = field(default_factory=list)
    tail: bytes = b""
    status: int = 0

    @property
    def num_tokens(self) -> int:
        """Completion tokens by the usage in the last chunk. Raises RuntimeError if there is none."""
        for line in reversed(self.tail.split(b"\n")):
            if line.startswith(b"data: {") and b'"completion_tokens"' in line:
                usage = json.loads(line[6:])["usage"]
                return int(usage["completion_tokens"])
        raise RuntimeError(f"the stream ended without usage, HTTP {self.status}: {self.tail[-400:]!r}")


class _Reader(asyncio.Protocol):
    """Sends one request and counts what comes back until the server closes."""

    def __init__(self, request: bytes, answer: Answer, done: "asyncio.Future[None]") -> None:
        self._request = request
        self._answer = answer
        self._done = done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._answer.sent_s = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        answer = self._answer
        if not answer.status:
            answer.status = int(data[9:12])
        answer.times.extend([now] * data.count(b"data: {"))
        answer.tail = (answer.tail + data)[-4096:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def request_bytes(host: str, ids: Sequence[int], max_tokens: int) -> bytes:
    """A streaming completion of token ids, greedy, that nothing ends before `max_tokens`."""
    body: dict[str, object] = {
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload


class Load:
    """Commands: `streams` and `ttft`."""

    def streams(
        self, host: str, num_streams: int, num_tokens: int, salt: int, prompt_tokens: int = 16
    ) -> dict[str, float]:
        """Tokens and events per second while every stream runs; tokens of a stream are spread over its events."""
        prompts = [random_ids(prompt_tokens, salt * 1000 + i) for i in range(num_streams)]
        answers = asyncio.run(_run(host, prompts, num_tokens))
        begin = max(answer.times[0] for answer in answers)
        end = min(answer.times[-1] for answer in answers)
        if end <= begin:
            raise RuntimeError("the streams did not overlap: more tokens are needed")
        num_events = sum(begin < at <= end for answer in answers for at in answer.times)
        tokens_per_event = sum(answer.num_tokens for answer in answers) / sum(len(answer.times) for answer in answers)
        return {
            "tokens_per_s": num_events * tokens_per_event / (end - begin),
            "events_per_token": 1 / tokens_per_event,
            "seconds": end - begin,
        }

    def ttft(self, host: str, prompt_tokens: int, salt: int) -> float:
        """Seconds from sending a request to its first event."""
        answer = asyncio.run(_run(host, [random_ids(prompt_tokens, salt)], 2))[0]
        if not answer.times:
            raise RuntimeError(f"no event, HTTP {answer.status}: {answer.tail[-400:]!r}")
        return answer.times[0] - answer.sent_s


async def _run(host: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
    loop = asyncio.get_running_loop()
    name, _, port = host.rpartition(":")
    answers = [Answer() for _ in prompts]
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in prompts]
    for ids, answer, end in zip(prompts, answers, ends, strict=True):
        request = request_bytes(host, ids, num_tokens)
        await loop.create_connection(lambda r=request, a=answer, e=end: _Reader(r, a, e), name, int(port))
    await asyncio.wait_for(asyncio.gather(*ends), 600)
    for answer in answers:
        if answer.status != 200 or not answer.times:
            raise RuntimeError(f"HTTP {answer.status}: {answer.tail[-400:]!r}")
    return answers


def main() -> None:
    """Serve commands."""
    load = Load()
    serve_commands({"streams": load.streams, "ttft": load.ttft})


if __name__ == "__main__":
    main()
