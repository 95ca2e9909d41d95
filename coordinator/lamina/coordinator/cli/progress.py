"""What a person sees while a model comes up: the split as a table, a bar per stage, plain lines without a terminal."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from lamina.coordinator.cluster.client import LoadProgress, StageLoaded
from lamina.coordinator.planner.memory import StagePlan
from lamina.coordinator.session import SessionSettings
from lamina.spec.address import Address
from lamina.spec.ids import WorkerName

# Of a worker that came, or came back, after the split.
IDLE_REMEDY = "the split works without it; restart `coordinator serve` to use it, or the next loss of a worker will"
_MIB = 2**20
_SILENCE_S = 1.0


def plain_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; lines to a pipe are not folded where a terminal would.

    It prints what it is given: `[fd00::1]:50051` and a file called `[/a]` are not taken for markup.
    """
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()  # None where it was closed before the start
    return Console(stderr=stderr, width=None if is_terminal else 110, markup=False, emoji=False, highlight=False)


def compact_table(*headers: str, num_texts: int) -> Table:
    """Without borders, so that ten columns fit 80 characters; after the first `num_texts`, numbers to the right."""
    table = Table(*headers, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[:num_texts]:
        column.overflow = "fold"  # a long name is, before a number is cut
    for column in table.columns[num_texts:]:
        column.justify, column.no_wrap = "right", True
    return table


def split_table(stages: Sequence[StagePlan], settings: SessionSettings) -> Group:
    """The stages and their bytes, with a sum, under a line that says for which settings."""
    table = compact_table("stage", "device", "layers", "weights", "KV", "arena", "total", "free", num_texts=3)
    totals = [0, 0, 0]
    for index, stage in enumerate(stages):
        memory = stage.memory
        parts = [memory.weight_bytes, memory.kv_bytes, memory.arena_bytes]
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
        cells = [_mib(part) for part in [*parts, sum(parts)]]
        free = _mib(stage.device.free_bytes) if stage.device.total_bytes else "-"  # 0: nobody was asked
        table.add_row(str(index), f"{stage.device.id} {stage.device.kind}", str(stage.layers), *cells, free)
    table.add_row("", "sum", "", *(_mib(part) for part in [*totals, sum(totals)]), "")
    stage_settings = settings.stage
    asked = f"--context {stage_settings.max_context} --parallel {stage_settings.max_seqs}"
    line = f"memory in MiB; KV for {settings.num_tokens} tokens in {stage_settings.kv_dtype} ({asked})"
    return Group(Text(line), table)


def _mib(num_bytes: int) -> str:
    mib = num_bytes / _MIB
    return f"{mib:.1f}" if mib < 1000 else f"{mib:.0f}"


def split_json(stages: Sequence[StagePlan]) -> list[dict[str, object]]:
    """The same for programs; sizes in bytes, layers half-open."""
    return [
        {
            "stage": index,
            "device": str(stage.device.id),
            "kind": stage.device.kind,
            "first_layer": stage.layers.start,
            "num_layers": len(stage.layers),
            "weight_bytes": stage.memory.weight_bytes,
            "kv_bytes": stage.memory.kv_bytes,
            "arena_bytes": stage.memory.arena_bytes,
            "total_bytes": stage.memory.total_bytes,
            "free_bytes": stage.device.free_bytes,
        }
        for index, stage in enumerate(stages)
    ]


def idle_line(name: WorkerName, address: Address) -> str:
    """What to say of a worker without layers."""
    return f"worker {name} at {address} holds no layers and idles"


@contextmanager
def connecting_line(
    console: Console, addresses: Sequence[Address], *, quiet: bool = False
) -> Iterator[Callable[[], None]]:
    """Say who is dialled once that takes a second; what is yielded is to be called when the workers have answered."""
    line = f"connecting to {', '.join(map(str, addresses))} …"
    timer = asyncio.get_running_loop().call_later(
        _SILENCE_S, lambda: None if quiet else console.print(line, soft_wrap=True)
    )
    try:
        yield timer.cancel
    finally:
        timer.cancel()


class LoadBars:
    """A bar per stage on a terminal, one line per loaded stage elsewhere. A context manager."""

    def __init__(self, console: Console, *, quiet: bool, interactive: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            console=console,
        )
        self._interactive = interactive and not quiet
        self._tasks: dict[int, TaskID] = {}

    def __enter__(self) -> Callable[[LoadProgress | StageLoaded], None]:
        if self._interactive:
            self._progress.start()
        return self._report

    def __exit__(self, *_: object) -> None:
        if self._interactive:
            self._progress.stop()

    def _report(self, event: LoadProgress | StageLoaded) -> None:
        stage = event.stage
        if not self._interactive:
            if isinstance(event, StageLoaded) and not self._quiet:
                self._console.print(f"loaded {stage}: {event.weight_bytes / _MIB:.1f} MiB of weights")
            return
        if stage.index not in self._tasks:
            self._tasks[stage.index] = self._progress.add_task(str(stage), total=None)
        task = self._tasks[stage.index]
        match event:
            case LoadProgress(_, done, size):
                self._progress.update(task, completed=done, total=size or None)
            case StageLoaded():
                total = self._progress.tasks[task].total or 1
                self._progress.update(task, completed=total, total=total)
