"""What the API serves: the model's state, and generation over whatever engine is there now.

Owns the state (loading, ready, lost, draining) and the count of running generations. Knows the vocabulary of
generation, no HTTP. Everything runs on the coordinator's loop, the preparation of requests in its own small pool.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric

from lamina.coordinator.api.choice import Choice
from lamina.coordinator.api.generation import Delta, Failed, Finished, GenerationEvent, GenerationRequest, Started
from lamina.coordinator.api.served_model import ServedModel
from lamina.coordinator.api.state import Draining, Loading, Lost, Ready, ServiceState
from lamina.coordinator.engine.engine import Engine, TokenStream
from lamina.coordinator.engine.sequence import SequenceRequest
from lamina.coordinator.telemetry.cluster_watch import ClusterWatch
from lamina.coordinator.telemetry.metrics import Metrics
from lamina.spec.errors import LaminaError, Unavailable

Result = TypeVar("Result")
_TOKENISING_THREADS = 2


class InferenceService:
    """One served model."""

    def __init__(self, model: ServedModel, metrics: Metrics) -> None:
        self.model = model
        self.metrics = metrics
        self.cluster = ClusterWatch()
        self.num_active = 0
        metrics.add_source(self.cluster.metrics)
        metrics.add_source(self._load_metrics)
        self._state: ServiceState = Loading()
        self._pool = ThreadPoolExecutor(_TOKENISING_THREADS, thread_name_prefix="tokenise")

    @property
    def state(self) -> ServiceState:
        """The state now: an engine whose pipeline ended is lost."""
        if isinstance(self._state, Ready) and (failure := self._state.engine.failure) is not None:
            return Lost(str(failure))
        return self._state

    @state.setter
    def state(self, state: ServiceState) -> None:
        self._state = state
        self.metrics.watch(state.engine.scheduler if isinstance(state, Ready) else None)

    def check_ready(self) -> None:
        """Raise Unavailable, with the reason, unless a request would be served now."""
        self._ready_engine()

    async def prepare(self, work: Callable[[], Result]) -> Result:
        """Run templates, tokenizer and the like in the pool, so that the loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def prepare_grammar(self, request: GenerationRequest) -> None:
        """Before `generate`: have the request's grammar compiled where it is used. Raises as that does."""
        if request.grammar:
            await self._ready_engine().prepare_grammar(request.grammar)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """Queue every choice of the request; its events as they come. Close it to cancel what is left.

        Raises Unavailable unless the model is ready, InvalidRequest, and CapacityExceeded if the queue is full.
        """
        engine = self._ready_engine()
        choices: list[Choice] = []
        streams: list[TokenStream] = []
        ends = frozenset() if request.ignore_eos else self.model.tokenizer.eos_ids
        stop_ids = request.stop_ids | ends
        try:
            for prompt in request.prompts:
                for choice in range(request.num_choices):
                    sequence = self._sequence(request, prompt, choice, stop_ids)
                    streams.append(engine.submit(sequence))
                    record = streams[-1].record
                    choices.append(Choice(len(choices), request, stop_ids, self.model.tokenizer, record))
        except LaminaError:
            for stream in streams:
                stream.close()
            raise
        return self._run(choices, streams)

    def close(self) -> None:
        """Give the pool back."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load_metrics(self) -> Iterator[Metric]:
        what = "Requests being answered, those that wait for a lost worker among them."
        yield GaugeMetricFamily("lamina_num_requests_open", what, self.num_active)

    def _ready_engine(self) -> Engine:
        match self.state:
            case Ready(engine):
                return engine
            case Loading():
                raise Unavailable("the model is loading; try again when /health says ok")
            case Lost(reason):
                raise Unavailable(f"the model is not available: {reason}")
            case Draining():
                raise Unavailable("the server is shutting down")

    def _sequence(
        self, request: GenerationRequest, prompt: tuple[int, ...], choice: int, stop_ids: frozenset[int]
    ) -> SequenceRequest:
        room = self.model.max_context - len(prompt)
        return SequenceRequest(
            prompt_ids=prompt,
            sampling=request.sampling,
            stop_ids=stop_ids,
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            choice=choice,
            grammar=request.grammar,
            cache_salt=request.cache_salt,
        )

    async def _run(self, choices: list[Choice], streams: list[TokenStream]) -> AsyncGenerator[GenerationEvent]:
        self.num_active += 1
        ended = False
        try:
            await asyncio.sleep(0)  # what was submitted leaves for the workers before an answer is prepared
            yield Started()
            if len(choices) == 1:
                events = self._follow(choices[0], streams[0])
            else:
                events = _merge([self._follow(*pair) for pair in zip(choices, streams, strict=True)])
            async for event in events:
                yield event
            ended = True
        except LaminaError as error:
            self.metrics.count_failure()
            ended = True
            yield Failed(error)
        finally:
            self.num_active -= 1
            if not ended:
                self.metrics.count_abort()
            for stream in streams:
                stream.close()

    async def _follow(self, choice: Choice, stream: TokenStream) -> AsyncGenerator[Delta | Finished]:
        timer = self.metrics.token_timer()
        async for token in stream:
            timer.tick()
            delta = choice.push(token)
            if delta is not None:
                yield delta
            if choice.finished is not None:
                self.metrics.count_end(choice.finished)
                yield choice.finished
                return


async def _merge(sources: list[AsyncGenerator[Delta | Finished]]) -> AsyncGenerator[Delta | Finished]:
    """The events of several choices as they come. The first failure ends all."""
    events: asyncio.Queue[Delta | Finished | LaminaError] = asyncio.Queue()

    async def pump(source: AsyncGenerator[Delta | Finished]) -> None:
        try:
            async for event in source:
                events.put_nowait(event)
        except LaminaError as error:
            events.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_left = len(sources)
        while num_left:
            event = await events.get()
            if isinstance(event, LaminaError):
                raise event
            num_left -= isinstance(event, Finished)
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
