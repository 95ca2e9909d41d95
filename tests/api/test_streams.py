"""What may happen to a running request: the client goes, the queue is full, nothing comes for long, a stage is lost."""

import asyncio
import json
import threading
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import pytest

from lamina.coordinator.api.settings import ApiSettings
from lamina.coordinator.model_file import ModelFile
from lamina.spec.errors import WorkerLost
from support.scripted import CONFIG, Api, text_script

Message = MutableMapping[str, Any]


class Client:
    """A client at the ASGI level, which may go away at any time."""

    def __init__(self, api: Api, **body: object) -> None:
        self.sent: list[Message] = []
        self._gone = asyncio.Event()
        self._body = json.dumps({"prompt": "Hi", **body}).encode()
        self._read = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("test", 80),
        }
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self._gone.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(condition: Any, deadline_s: float = 5.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def api(model: ModelFile) -> Iterator[Api]:
    with Api(model, text_script(model, "and so on " * 60)) as api:
        yield api


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_frees_its_blocks(api: Api, stream: bool, n: int) -> None:
    """B-36: the sequence leaves the next plan; its blocks are free once the issued steps are done."""

    async def scenario() -> None:
        scheduler = api.engine.scheduler
        client = Client(api, stream=stream, n=n, max_tokens=200)
        await until(lambda: scheduler.num_running == n and scheduler.kv_usage_ratio > 0)
        assert api.service.num_active == 1
        api.pipeline.going.clear()
        client.leave()
        await client.task
        assert scheduler.num_running == 0
        assert scheduler.kv_usage_ratio > 0  # an issued step still names them
        api.pipeline.going.set()
        await until(lambda: scheduler.kv_usage_ratio == 0)
        assert api.service.num_active == 0
        num_made = len(api.pipeline.removed)
        assert num_made == n

    api.run(scenario())
    assert 'finished_reason="abort"} 1.0' in api.get("/metrics").text


def test_a_client_that_goes_while_waiting_leaves_the_queue(model: ModelFile) -> None:
    with Api(model, text_script(model, "x " * 100), config=replace(CONFIG, max_seqs=1, max_logit_rows=1)) as api:

        async def scenario() -> None:
            scheduler = api.engine.scheduler
            first = Client(api, max_tokens=200)
            await until(lambda: scheduler.num_running == 1)
            second = Client(api, max_tokens=200)
            await until(lambda: scheduler.num_waiting == 1)
            second.leave()
            await second.task
            assert scheduler.num_waiting == 0
            first.leave()
            await first.task

        api.run(scenario())


def test_a_client_that_goes_while_its_grammar_is_compiled_makes_nobody_wait(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars are compiled one after the other: what nobody wants any more is not."""
    may_go_on, compiled = threading.Event(), []
    with Api(model, text_script(model, "{}")) as api:
        grammars = api.pipeline.grammars

        def compile_later(grammar: str) -> None:
            assert may_go_on.wait(20)
            compiled.append(grammar)

        monkeypatch.setattr(grammars, "_try", compile_later)

        async def scenario() -> None:
            clients = [Client(api, response_format={"type": "json_object"}) for _ in range(3)]
            await until(lambda: grammars._preparing._work_queue.qsize() == 2)  # behind that of the first
            for client in clients:
                client.leave()
                await client.task
                assert not client.sent
            may_go_on.set()
            await until(lambda: grammars._preparing._work_queue.empty())
            assert len(compiled) == 1

        api.run(scenario())
        assert not api.engine.requests


def test_a_full_queue_is_a_429_with_retry_after(model: ModelFile) -> None:
    config = replace(CONFIG, max_seqs=1, max_logit_rows=1, max_waiting=4)
    with Api(model, text_script(model, "x " * 100), config=config) as api:

        async def scenario() -> tuple[int, dict[bytes, bytes], str]:
            api.pipeline.going.clear()
            clients = [Client(api, max_tokens=5, stream=True) for _ in range(3)]
            await until(lambda: api.engine.scheduler.num_waiting == 2)
            # of a request for several choices, of which only some fit, none stays behind
            many = Client(api, max_tokens=5, n=3)
            await many.task
            assert api.engine.scheduler.num_waiting == 2
            assert many.sent[0]["status"] == 429
            clients += [Client(api, max_tokens=5, stream=True) for _ in range(2)]
            await until(lambda: api.engine.scheduler.num_waiting == 4)
            refused = Client(api, max_tokens=5, stream=True)
            await refused.task
            api.pipeline.going.set()
            for client in clients:
                await client.task
                assert client.sent[0]["status"] == 200
            return refused.sent[0]["status"], dict(refused.sent[0]["headers"]), refused.text

        status, headers, text = api.run(scenario())
        assert status == 429
        assert int(headers[b"retry-after"]) > 0
        assert json.loads(text)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("echo", [True, False])
def test_a_silent_stream_is_pinged(model: ModelFile, echo: bool) -> None:
    """Also while nothing but the head of the response was sent, as in a long prefill."""
    with Api(model, text_script(model, "done"), settings=ApiSettings(ping_s=0.05)) as api:

        async def scenario() -> str:
            api.pipeline.going.clear()
            client = Client(api, stream=True, max_tokens=4, echo=echo)
            await until(lambda: client.text.count(": ping\n\n") >= 2)
            api.pipeline.going.set()
            await client.task
            return client.text

        text = api.run(scenario())
        assert text.startswith('data: {"id"' if echo else ": ping\n\n")
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_stage_lost_in_mid_generation(api: Api, stream: bool) -> None:
    """C-18: the request ends with an error that names the worker, and only then; no [DONE] follows."""

    async def scenario() -> Client:
        client = Client(api, stream=stream, max_tokens=200)
        await until(lambda: api.engine.scheduler.num_running == 1)
        api.pipeline.fail(WorkerLost("worker w1 (layers 15-29): connection lost"))
        async with asyncio.timeout(5):
            await client.task
        return client

    client = api.run(scenario())
    assert "w1 (layers 15-29)" in client.text
    assert "[DONE]" not in client.text
    assert client.sent[0]["status"] == (200 if stream else 503)
    if stream:
        last = client.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_lost"
    assert not client.sent[-1].get("more_body")


def test_a_sequence_that_fails_ends_alone(model: ModelFile) -> None:
    """A-05: non-finite logits of one sequence are its own error; the others go on."""
    with Api(model, text_script(model, "and so on " * 20)) as api:

        async def scenario() -> tuple[Client, Client]:
            sound = Client(api, stream=True, max_tokens=30)
            await until(lambda: api.engine.scheduler.num_running == 1)
            broken = Client(api, stream=True, max_tokens=30)
            await until(lambda: len(api.pipeline.adds) == 2)
            api.pipeline.poisoned.add(list(api.pipeline.adds)[1])
            await asyncio.gather(sound.task, broken.task)
            return sound, broken

        sound, broken = api.run(scenario())
        assert "NumericalError" not in sound.text
        assert sound.text.endswith("[DONE]\n\n")
        assert '"code": "numerical_error"' in broken.text
        assert not api.engine.scheduler.num_running


def test_many_streams_with_random_ends_leave_nothing(model: ModelFile) -> None:
    """P-13: 60 requests, some whole, some left, some stopped: no sequence and no block stays."""
    with Api(model, text_script(model, "a b c d e f g h " * 4), config=replace(CONFIG, max_waiting=64)) as api:

        async def scenario() -> None:
            clients = []
            for i in range(60):
                options = ({"stop": "d"}, {"n": 2}, {"max_tokens": 3}, {})[i % 4]
                clients.append(Client(api, stream=i % 2 == 0, **options))
                if i % 3 == 0:
                    await asyncio.sleep(0.001 * (i % 7))
                    clients[i // 2].leave()
            await asyncio.gather(*(client.task for client in clients))
            await until(lambda: api.engine.scheduler.kv_usage_ratio == 0)
            scheduler = api.engine.scheduler
            assert (scheduler.num_running, scheduler.num_waiting, api.service.num_active) == (0, 0, 0)

        api.run(scenario())
