"""An engine without workers: the real scheduler and the real sampler over scripted logits, and the HTTP API on top.

The last stage's part (stop ids, max_tokens, grammar, logprobs) is the worker's own Sampler, so what a test sees of it
is what a cluster would do. There is no socket and no clock of its own.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import httpx
import numpy as np

from lamina.coordinator.api.app import create_app
from lamina.coordinator.api.served_model import ServedModel
from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.settings import OPEN, ApiSettings
from lamina.coordinator.api.state import Ready
from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.coordinator.engine.engine import Engine, TokenStream
from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.engine.sequence import SequenceRequest
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.telemetry.metrics import Metrics
from lamina.rpc_worker.grammar import GrammarCompiler
from lamina.rpc_worker.sampler import Sampler
from lamina.spec.errors import LaminaError
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import Epoch, PlacementId, SeqId
from lamina.spec.placement import Placement
from lamina.spec.step import AddSequence, RemoveSequence, StepDone, StepPlan

Script = Callable[[AddSequence, int], int]  # (sequence, output position) -> the token with the highest logit
MAX_CONTEXT = 256
CONFIG = SchedulerConfig(
    num_stages=1,
    max_rows=64,
    max_seqs=8,
    max_logit_rows=8,
    max_context=MAX_CONTEXT,
    num_blocks=(128,),
    prefill_chunk_tokens=64,
    max_waiting=4,
)


class ScriptedPipeline:
    """Answers every step at once, unless it is held."""

    def __init__(self, model: ModelFile, script: Script, random_logits: bool = False) -> None:
        self.placement = Placement(PlacementId("scripted"), Epoch(0), 0, ())
        self.vocab_size = model.tokenizer.vocab_size
        self.grammars = GrammarCompiler(read_gguf(model.path).metadata, str(model.path), self.vocab_size)
        self.script = script
        self.adds: dict[SeqId, AddSequence] = {}  # every one that came, also of sequences that are gone
        self.removed: list[SeqId] = []
        self.poisoned: set[SeqId] = set()  # their logits are NaN
        self.going = asyncio.Event()
        self.going.set()
        self._sampler = Sampler(self.vocab_size, self.grammars)
        self._made: dict[SeqId, int] = {}
        self._plans: asyncio.Queue[StepPlan | LaminaError] = asyncio.Queue()
        self._random = np.random.default_rng(7) if random_logits else None

    def issue(self, plan: StepPlan) -> None:
        self._plans.put_nowait(plan)

    async def prepare_grammar(self, grammar: str) -> None:
        await self.grammars.prepare(grammar)

    def add_sequence(self, add: AddSequence) -> None:
        self.adds[add.seq] = add
        self._made[add.seq] = add.num_generated
        self._sampler.add(add)

    def remove_sequence(self, remove: RemoveSequence) -> None:
        self.removed.append(remove.seq)
        self._sampler.remove(remove.seq)

    def fail(self, error: LaminaError) -> None:
        """The pipeline ends."""
        self._plans.put_nowait(error)

    async def next_done(self) -> StepDone:
        plan = await self._plans.get()
        await self.going.wait()
        await asyncio.sleep(0)
        if isinstance(plan, LaminaError):
            raise plan
        rows = [(piece.seq, piece.end) for piece in plan.sampled()]
        logits = np.zeros((len(rows), self.vocab_size), np.float32)
        for row, (seq, _) in zip(logits, rows, strict=True):
            if self._random is not None:
                row[:] = self._random.normal(0, 3, self.vocab_size)
            row[self.script(self.adds[seq], self._made[seq])] = 30.0
            self._made[seq] += 1
            if seq in self.poisoned:
                row[:] = np.nan
        return StepDone(plan.epoch, plan.step, self._sampler.sample(rows, logits))

    async def close(self, *, unload: bool) -> None:
        """Nothing to close."""


class RecordingEngine(Engine):
    """Keeps every request that was submitted."""

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline) -> None:
        super().__init__(scheduler, pipeline)
        self.requests: list[SequenceRequest] = []

    def submit(self, request: SequenceRequest) -> TokenStream:
        self.requests.append(request)
        return super().submit(request)


class Api:
    """The app over a scripted engine, called from synchronous tests. Use as a context manager."""

    def __init__(
        self,
        model: ModelFile,
        script: Script,
        *,
        config: SchedulerConfig = CONFIG,
        settings: ApiSettings = OPEN,
        random_logits: bool = False,
    ) -> None:
        self._runner = asyncio.Runner()
        self.model = model
        self.run(self._build(script, config, settings, random_logits))

    async def _build(self, script: Script, config: SchedulerConfig, settings: ApiSettings, random_logits: bool) -> None:
        self.pipeline = ScriptedPipeline(self.model, script, random_logits)
        self.engine = RecordingEngine(Scheduler(config, Epoch(0)), cast(Pipeline, self.pipeline))
        self.engine.start()
        context = config.max_context
        served = ServedModel("scripted", self.model.tokenizer, self.model.chat, context, 2 * context, created_s=1)
        self.service = InferenceService(served, Metrics())
        self.service.state = Ready(self.engine)
        self.app = create_app(self.service, settings)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.client.aclose())
        self.run(self.engine.close())
        self.service.close()
        self._runner.close()

    def run(self, work: Any) -> Any:
        """Run a coroutine on the app's loop."""
        return self._runner.run(work)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Any request."""
        return cast(httpx.Response, self.run(self.client.request(method, path, **options)))

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return self.request("GET", path, **options)

    def post(self, path: str, body: Mapping[str, object], **options: Any) -> httpx.Response:
        """POST of a JSON object."""
        return self.request("POST", path, json=body, **options)

    def chat(self, **body: object) -> httpx.Response:
        """A chat completion of a short conversation."""
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **body})

    def complete(self, **body: object) -> httpx.Response:
        """A text completion of a short prompt."""
        return self.post("/v1/completions", {"prompt": "Hi", **body})

    @property
    def last_prompt(self) -> tuple[int, ...]:
        """The prompt of the newest sequence."""
        return self.engine.requests[-1].prompt_ids

    @property
    def last_add(self) -> AddSequence:
        """What the last stage was told of the newest sequence."""
        return list(self.pipeline.adds.values())[-1]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2] if not part.startswith(":")]


def text_script(model: ModelFile, *texts: str) -> Script:
    """Sequence i says texts[i % len]; then the end of text."""
    ids = [model.tokenizer.encode(text, add_special=False, parse_special=False) for text in texts]
    end = model.tokenizer.vocabulary.eos_id
    assert end is not None

    def script(add: AddSequence, place: int) -> int:
        tokens: Sequence[int] = ids[add.choice % len(ids)]
        return tokens[place] if place < len(tokens) else end

    return script
