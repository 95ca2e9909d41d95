"""`coordinator run`: bring a model up, answer one prompt on standard output, take it down again."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rich.console import Console

from lamina.coordinator.cli.options import is_interactive, take_any_text
from lamina.coordinator.cli.progress import LoadBars, connecting_line, idle_line, plain_console, split_table
from lamina.coordinator.engine.sequence import SequenceRequest
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.planner.memory import StagePlan
from lamina.coordinator.session import Session, SessionSettings, addresses_of, open_session
from lamina.coordinator.telemetry.cluster_watch import idle_workers
from lamina.coordinator.text.detokenizer import Detokenizer
from lamina.spec.errors import InvalidRequest, NumericalError
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import FinishReason


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One prompt and how to answer it."""

    prompt: str
    sampling: SamplingParams
    max_tokens: int
    chat: bool
    quiet: bool


async def run(model: ModelFile, settings: SessionSettings, request: RunRequest) -> None:
    """Stream the answer to standard output; the split, loading and timing go to standard error.

    SIGTERM and a closed terminal end it as Ctrl-C does: the stages are unloaded first.
    """
    cancel_on_signals()
    take_any_text()
    console = plain_console(stderr=True)
    prompt_ids = encode_prompt(model, request)

    async with AsyncExitStack() as stack:
        with (
            connecting_line(console, addresses_of(settings), quiet=request.quiet) as has_connected,
            LoadBars(console, quiet=request.quiet, interactive=is_interactive()) as report,
        ):

            def show(stages: tuple[StagePlan, ...]) -> None:
                has_connected()
                if not request.quiet:
                    console.print(split_table(stages, settings))

            session = await stack.enter_async_context(open_session(model, settings, show, report))
        if not request.quiet:
            _name_idle(session, console)
        await _answer(session, prompt_ids, request, console)


def cancel_on_signals() -> None:
    """Have SIGTERM and SIGHUP cancel the present task, as Ctrl-C does."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if task is not None:
            loop.add_signal_handler(number, task.cancel)


def _name_idle(session: Session, console: Console) -> None:
    known = {client.profile.name: client.address for client in session.workers}
    for name, address in idle_workers(session.pipeline.placement, known).items():
        console.print(f"{idle_line(name, address)}: the split has no range for it", soft_wrap=True)


def encode_prompt(model: ModelFile, request: RunRequest) -> tuple[int, ...]:
    """Token ids of the prompt, through the chat template or as it stands. Raises InvalidRequest if it is empty."""
    if request.chat:
        return tuple(model.chat.encode([{"role": "user", "content": request.prompt}]))
    ids = model.tokenizer.encode(request.prompt, add_special=True, parse_special=True)
    if not ids:
        raise InvalidRequest("the prompt is empty")
    return tuple(ids)


async def _answer(session: Session, prompt_ids: tuple[int, ...], request: RunRequest, console: Console) -> None:
    tokenizer = session.model.tokenizer
    sequence = SequenceRequest(
        prompt_ids=prompt_ids,
        sampling=request.sampling,
        stop_ids=tokenizer.eos_ids,
        max_tokens=request.max_tokens,
    )
    detokenizer = Detokenizer(tokenizer)
    start = time.perf_counter()
    first = start
    num_tokens = 0
    try:
        async for event in session.engine.submit(sequence):
            if event.finish is FinishReason.ERROR:
                raise NumericalError(event.error)
            if num_tokens == 0:
                first = time.perf_counter()
            num_tokens += 1
            print(detokenizer.push([event.token]), end="", flush=True)
    finally:  # whatever is said next begins on a line of its own
        end = time.perf_counter()
        print(detokenizer.flush(), flush=True)
    if not request.quiet:
        console.print(timing_line(len(prompt_ids), first - start, num_tokens, end - first), soft_wrap=True)


def timing_line(num_prompt: int, prefill_s: float, num_tokens: int, decode_s: float) -> str:
    """One line per request (C-21). The first token belongs to prefill, the others to decode."""
    num_decoded = num_tokens - 1
    parts = [f"prefill: {num_prompt} tokens in {1000 * prefill_s:.0f} ms, {num_prompt / prefill_s:.1f} tokens/s"]
    if num_decoded > 0:
        per_token = f"{1000 * decode_s / num_decoded:.1f} ms/token, {num_decoded / decode_s:.1f} tokens/s"
        parts.append(f"decode: {num_decoded} tokens in {1000 * decode_s:.0f} ms, {per_token}")
    return " | ".join([*parts, f"total: {1000 * (prefill_s + decode_s):.0f} ms"])
