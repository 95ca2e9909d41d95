"""`coordinator bench`: measures a model over the workers that the user names.

Progress goes to standard error, the result to standard output.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lamina.coordinator.cli import options
from lamina.coordinator.cli.config_file import Config
from lamina.coordinator.cli.options import is_interactive
from lamina.coordinator.cli.progress import LoadBars, plain_console, split_table
from lamina.coordinator.cli.run import cancel_on_signals
from lamina.coordinator.model_file import ModelFile, open_model_file
from lamina.coordinator.perplexity import Perplexity, Window, WindowScorer, cut_windows, perplexity_of
from lamina.coordinator.planner.memory import StagePlan
from lamina.coordinator.session import SessionSettings, open_pipeline
from lamina.spec.errors import InvalidConfig, InvalidRequest
from lamina.spec.placement import StageSettings

_DEFAULT_CHUNK = 512
_MAX_SCORED_ROWS = 128  # of one step; each costs 4 x vocabulary bytes on the last stage
_PLAIN_LINES = 10  # of progress without a terminal

app = typer.Typer(no_args_is_help=True, help="Measure a model over the workers.", rich_markup_mode=None)


@dataclass(frozen=True, slots=True)
class PerplexityRequest:
    """Windows to score, and how to say the result."""

    windows: list[Window]
    quiet: bool
    as_json: bool


@app.command()
def perplexity(
    model: options.Model,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text; standard input if not given.", envvar="LAMINA_TEXT", show_default=False),
    ] = None,
    chunk: Annotated[
        str,
        typer.Option(
            help="Tokens of a chunk, whose second half is scored; 512, or the model's context if that is shorter.",
            envvar="LAMINA_CHUNK",
        ),
    ] = "",
    max_chunks: Annotated[int, typer.Option(help="0 = the whole text.", envvar="LAMINA_MAX_CHUNKS", min=0)] = 0,
    workers: options.Workers = "",
    split: options.Split = "",
    split_file: options.SplitFile = None,
    kv_dtype: options.KvDtype = "f16",
    wire_dtype: options.WireDtype = "f32",
    max_rows: options.MaxRows = 512,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.", envvar="LAMINA_QUIET")] = False,
    as_json: options.Json = False,
    config: Config = None,
) -> None:
    """Perplexity of a text, comparable with llama.cpp's `llama-perplexity` on the same text and chunk."""
    opened = open_model_file(model)
    length = options.parse_count(chunk, "--chunk") if chunk else min(_DEFAULT_CHUNK, opened.spec.context_length)
    if length > opened.spec.context_length:
        made_for = opened.spec.context_length
        raise InvalidConfig(f"--chunk {length} is more than the {made_for} tokens that this model was made for")
    addresses = options.parse_workers(workers)
    if not addresses and split_file is None:
        raise InvalidConfig(options.NO_WORKERS)
    tokenizer = opened.tokenizer
    tokens = tokenizer.encode(_read_text(text), add_special=True, parse_special=False)
    windows = cut_windows(tokens, length, tokenizer.bos_id if tokenizer.adds_bos else None, max_chunks or None)
    settings = SessionSettings(
        workers=addresses,
        split=options.split_choice(split, split_file),
        stage=StageSettings(
            max_rows=max_rows,
            max_seqs=1,
            max_logit_rows=min(_MAX_SCORED_ROWS, length, max_rows),
            max_context=length,
            kv_dtype=kv_dtype,
            wire_dtype=wire_dtype,
        ),
        num_tokens=length * (1 + max(1, len(addresses))),  # a window for each stage, and the next
        gives_back=False,
    )
    asyncio.run(_score(opened, settings, PerplexityRequest(windows, quiet, as_json)))


def _read_text(path: Path | None) -> str:
    if path is None:
        return options.read_prompt()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"--text {path} is not UTF-8: byte {error.start}") from None


async def _score(model: ModelFile, settings: SessionSettings, request: PerplexityRequest) -> None:
    cancel_on_signals()
    console = plain_console(stderr=True)

    def show_split(stages: tuple[StagePlan, ...]) -> None:
        if not request.quiet:
            console.print(split_table(stages, settings))

    async with AsyncExitStack() as stack:
        with LoadBars(console, quiet=request.quiet, interactive=is_interactive()) as report:
            pipeline = await stack.enter_async_context(open_pipeline(model, settings, show_split, report))
        length = settings.stage.max_context
        with _ScoreProgress(console, len(request.windows), quiet=request.quiet) as progress:
            scorer = WindowScorer(pipeline, request.windows, lambda done: progress.show(done, scorer.scores, length))
            start_s = time.perf_counter()
            await scorer.run()
            seconds = time.perf_counter() - start_s
    _print_result(model, settings, request, perplexity_of(scorer.scores), seconds)


def _print_result(
    model: ModelFile, settings: SessionSettings, request: PerplexityRequest, result: Perplexity, seconds: float
) -> None:
    length, num_windows = len(request.windows[0]), len(request.windows)
    num_tokens = length * num_windows
    if request.as_json:
        facts = {
            "model": model.spec.name,
            "digest": model.spec.digest,
            "kv_dtype": settings.stage.kv_dtype,
            "chunk": length,
            "num_chunks": num_windows,
            "num_tokens": num_tokens,
            "num_scored": result.num_scored,
            "perplexity": result.value,
            "standard_error": result.standard_error,
            "seconds": seconds,
            "tokens_per_s": num_tokens / seconds,
        }
        print(json.dumps(facts, indent=2))
        return
    print(f"perplexity {result.value:.4f} ± {result.standard_error:.4f}")
    where = f"{num_windows} chunks of {length}, {result.num_scored} of {num_tokens} tokens scored"
    print(f"{where}, {settings.stage.kv_dtype} cache, {num_tokens / seconds:.1f} tokens/s")


class _ScoreProgress:
    """Chunks done, perplexity so far, rate: a bar on a terminal, a few plain lines elsewhere. A context manager."""

    def __init__(self, console: Console, num_windows: int, *, quiet: bool) -> None:
        self._console = console
        self._num_windows = num_windows
        self._plain = not quiet and not is_interactive()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
            disable=quiet or not is_interactive(),
        )  # fmt: skip
        self._task = self._bar.add_task("scoring", total=num_windows)

    def __enter__(self) -> "_ScoreProgress":
        self._start_s = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, num_done: int, scores: Sequence[float], length: int) -> None:
        """So many windows of `length` tokens are done, with these log-probabilities."""
        rate = num_done * length / (time.perf_counter() - self._start_s)
        so_far = f"perplexity {perplexity_of(scores).value:.3f}, {rate:.0f} tokens/s"
        self._bar.update(self._task, completed=num_done, description=so_far)
        tenth = _PLAIN_LINES * num_done // self._num_windows
        if self._plain and tenth > _PLAIN_LINES * (num_done - 1) // self._num_windows:
            self._console.print(f"chunk {num_done} of {self._num_windows}: {so_far}")
