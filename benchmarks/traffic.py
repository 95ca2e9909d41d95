"""Random requests for a serving coordinator, and whether their answers are right. Standard library only.

Owns the mix, the HTTP (one connection per request, HTTP/1.0: the end of the connection is the end of the answer) and
the judgement of a single answer; when to send is the caller's.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contest import random_ids

_ANSWER_DEADLINE_S = 200.0
_CANCEL_SHARE = 0.2
_SYSTEM = "You are a terse assistant on a ship. " + " ".join(f"Rule {i}: say rule {i} aloud." for i in range(30))
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
_WORDS = ("sea", "ship", "port", "star", "wind", "sail", "rope", "tide", "mast", "deck", "crew", "bell", "fog", "rain")


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    kind: str
    what: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; its body is incomplete if we left."""

    status: int
    head: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Wish:
    """A request and what its answer must be like."""

    kind: str
    path: str
    body: dict[str, Any]
    status: int = 200
    num_choices: int = 1


class Api:
    """Requests over plain sockets."""

    def __init__(self, host: str) -> None:
        self._host, _, port = host.rpartition(":")
        self._port = int(port)

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object."""
        answer: dict[str, Any] = json.loads(await self.get_raw(path))
        return answer

    async def get_raw(self, path: str) -> bytes:
        """The body of a GET."""
        return (await self._exchange(f"GET {path} HTTP/1.0\r\n\r\n".encode())).body

    async def post(self, path: str, body: dict[str, Any], leave_after_s: float | None = None) -> Reply | None:
        """The whole answer; None if it did not come in time, or we left as we wanted to."""
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE_S if leave_after_s is None else leave_after_s):
                return await self._exchange(head.encode() + payload)
        except TimeoutError:
            return None

    async def _exchange(self, request: bytes) -> Reply:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return Reply(int(head[9:12] or 0), head, body)


class Traffic:
    """Draws requests, sends them, judges the answers, counts."""

    def __init__(self, api: Api, rng: random.Random) -> None:
        self._api = api
        self._rng = rng
        self._probe_text: str | None = None
        self.outcomes: Counter[str] = Counter()
        self.num_tokens = 0

    async def one(self) -> Violation | None:
        """One random request to its end, or until we leave."""
        wish = self._draw()
        leaves = wish.status == 200 and self._rng.random() < _CANCEL_SHARE
        leave_after_s = self._rng.uniform(0.0, 3.0) if leaves else None
        return await self._send(wish, leave_after_s)

    async def fill_cache(self, num_tokens: int) -> None:
        """Prompts that are all different, of so many tokens together and some more."""
        length = 1500
        for i in range(-(-num_tokens // length) + 1):
            body = {"prompt": random_ids(length, 5000 + i), "max_tokens": 1}
            reply = await self._api.post("/v1/completions", body)
            if reply is None or reply.status != 200:
                raise RuntimeError(f"the first prompts are not answered: {reply}")

    async def burst(self, num_requests: int) -> list[Violation]:
        """So many at once; those beyond the queue are refused with 429, which is right."""
        wishes = [self._completion(max_tokens=4) for _ in range(num_requests)]
        found = await asyncio.gather(*(self._send(wish, None) for wish in wishes))
        return [violation for violation in found if violation is not None]

    async def probe(self) -> Violation | None:
        """A sampled answer with a seed: the same as the first time, whatever ran in between."""
        body = {"prompt": random_ids(40, 7), "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11}
        reply = await self._api.post("/v1/completions", body)
        if reply is None or reply.status != 200:
            return Violation("probe", f"not answered: {reply}")
        text = str(json.loads(reply.body)["choices"][0]["text"])
        if self._probe_text is None:
            self._probe_text = text
        return None if text == self._probe_text else Violation("probe", f"{text!r}, first it was {self._probe_text!r}")

    def counts(self) -> str:
        """For the log."""
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))

    async def _send(self, wish: Wish, leave_after_s: float | None) -> Violation | None:
        try:
            reply = await self._api.post(wish.path, wish.body, leave_after_s)
        except OSError as error:
            self.outcomes["broken"] += 1
            return Violation("connection", f"{wish.kind}: {error}")
        if reply is None:
            self.outcomes["stuck" if leave_after_s is None else "cancelled"] += 1
            return Violation("stuck", f"{wish.kind}: no answer") if leave_after_s is None else None
        if reply.status == 429 and b"retry-after" in reply.head.lower():
            self.outcomes["refused"] += 1
            return None
        problem = self._judge(wish, reply)
        self.outcomes["wrong" if problem else "answered" if wish.status == 200 else "bad"] += 1
        return Violation(wish.kind, problem) if problem else None

    def _judge(self, wish: Wish, reply: Reply) -> str:
        """What is wrong with an answer, "" if nothing."""
        if reply.status != wish.status:
            return f"HTTP {reply.status} instead of {wish.status}: {reply.body[:200]!r}"
        if wish.status != 200:
            return "" if b'"error"' in reply.body else f"no error object: {reply.body[:200]!r}"
        if wish.body.get("stream"):
            return self._judge_stream(wish, reply.body)
        answer = json.loads(reply.body)
        ends = [choice["finish_reason"] for choice in answer["choices"]]
        if wish.kind == "schema" and ends == ["stop"]:
            try:
                value = json.loads(answer["choices"][0]["message"]["content"])
            except ValueError:
                return f"no JSON: {answer['choices'][0]['message']}"
            if sorted(value) != ["age", "name", "ok"]:
                return f"not by the schema: {value}"
        return self._judge_ends(wish, ends, answer["usage"])

    def _judge_stream(self, wish: Wish, body: bytes) -> str:
        lines = [line for line in body.split(b"\n\n") if line.startswith(b"data: ")]
        if not lines or lines[-1] != b"data: [DONE]":
            return f"the stream ends with {body[-200:]!r}"
        events = [json.loads(line[6:]) for line in lines[:-1]]
        choices = [choice for event in events for choice in event["choices"]]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return self._judge_ends(wish, ends, events[-1]["usage"])

    def _judge_ends(self, wish: Wish, ends: Sequence[str], usage: dict[str, int]) -> str:
        if len(ends) != wish.num_choices or not {*ends} <= {"stop", "length"}:
            return f"{wish.num_choices} choices wanted, they ended with {ends}"
        if not 0 < usage["completion_tokens"] <= wish.num_choices * wish.body["max_tokens"]:
            return f"usage {usage} of a request for {wish.body['max_tokens']} tokens"
        self.num_tokens += usage["completion_tokens"]
        return ""

    # -- the mix

    def _draw(self) -> Wish:
        kinds = {
            self._chat: 25, self._completion: 20, self._shared_prefix: 15, self._long_prompt: 10,
            self._schema: 10, self._several: 12, self._bad: 8,
        }  # fmt: skip
        return self._rng.choices([*kinds], [*kinds.values()])[0]()

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        some: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]), "top_p": rng.choice([0.8, 0.95, 1.0]),
            "top_k": rng.choice([0, 1, 20, 200]), "min_p": rng.choice([0.0, 0.05]),
            "repetition_penalty": rng.choice([1.0, 1.1]), "presence_penalty": rng.choice([0.0, 0.5]),
            "stop": rng.choice([["\n\n"], [".", "!"], "zz"]), "seed": rng.randrange(2**32),
        }  # fmt: skip
        return {name: value for name, value in some.items() if rng.random() < 0.5}

    def _streaming(self) -> dict[str, Any]:
        if self._rng.random() < 0.4:
            return {}
        return {"stream": True, "stream_options": {"include_usage": True}}

    def _words(self, num_words: int) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(num_words))

    def _chat(self) -> Wish:
        messages = [{"role": "user", "content": f"Tell of {self._words(self._rng.randint(1, 40))}."}]
        body = {"messages": messages, "max_tokens": self._rng.randint(1, 60), **self._sampling(), **self._streaming()}
        return Wish("chat", "/v1/chat/completions", body)

    def _completion(self, max_tokens: int = 0) -> Wish:
        body = {
            "prompt": self._words(self._rng.randint(1, 60)), "max_tokens": max_tokens or self._rng.randint(1, 80),
            **self._sampling(), **self._streaming(),
        }  # fmt: skip
        return Wish("completion", "/v1/completions", body)

    def _shared_prefix(self) -> Wish:
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": self._words(5)}]
        body = {"messages": messages, "max_tokens": self._rng.randint(1, 30), **self._streaming()}
        return Wish("prefix", "/v1/chat/completions", body)

    def _long_prompt(self) -> Wish:
        ids = random_ids(self._rng.randint(400, 1500), self._rng.randrange(2**20))
        body = {"prompt": ids, "max_tokens": self._rng.randint(1, 200), "ignore_eos": True, **self._streaming()}
        return Wish("long", "/v1/completions", body)

    def _schema(self) -> Wish:
        messages = [{"role": "user", "content": f"A sailor called {self._words(1)} as JSON."}]
        form = {"type": "json_schema", "json_schema": {"name": "sailor", "strict": True, "schema": _SCHEMA}}
        return Wish("schema", "/v1/chat/completions", {"messages": messages, "max_tokens": 80, "response_format": form})

    def _several(self) -> Wish:
        n = self._rng.randint(2, 4)
        body = {
            "prompt": self._words(self._rng.randint(1, 80)), "n": n, "max_tokens": self._rng.randint(1, 30),
            **self._sampling(), **self._streaming(),
        }  # fmt: skip
        return Wish("several", "/v1/completions", body, num_choices=n)

    def _bad(self) -> Wish:
        bodies: list[dict[str, Any]] = [
            {"prompt": "x", "max_tokens": 4, "colour": "blue"},
            {"prompt": random_ids(5000, 3), "max_tokens": 4},
            {"prompt": "x", "temperature": -1.0},
            {
                "prompt": "x",
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
            },
        ]
        return Wish("bad", "/v1/completions", self._rng.choice(bodies), status=400)
