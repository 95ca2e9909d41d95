"""Options that several commands share, each with its LAMINA_* twin, and their checks."""

import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.coordinator.planner.split_file import parse_split
from lamina.coordinator.session import SplitChoice
from lamina.spec.address import Address, parse_address
from lamina.spec.errors import InvalidConfig, InvalidRequest
from lamina.spec.placement import GRAPH_MODES, KV_DTYPES, MAX_ROWS, WIRE_DTYPES, StageSettings
from lamina.spec.sizes import parse_size


def one_of(values: Sequence[str], help_: str, envvar: str) -> Any:
    """An option with a few values: checked before anything is read or dialled, offered by shell completion.

    The command then raises InvalidConfig for another value.
    """

    def check(parameter: typer.CallbackParam, value: str) -> str:
        if value.lower() not in values:
            option = f"--{(parameter.name or '').replace('_', '-')}"
            raise InvalidConfig(f"{option} {value!r} is none of {', '.join(values)}")
        return value.lower()

    return typer.Option(
        help=f"{help_}{', '.join(values)}.", envvar=envvar, callback=check, autocompletion=lambda: [*values]
    )


Model = Annotated[Path, typer.Argument(help="Path of a GGUF file.", show_default=False)]
Workers = Annotated[str, typer.Option(help="Workers in pipeline order: host:port,host:port,…", envvar="LAMINA_WORKERS")]
Split = Annotated[
    str,
    typer.Option(help="Layers of each worker, like 0-11,12-29; else by free memory.", envvar="LAMINA_SPLIT"),
]
SplitFile = Annotated[
    Path | None, typer.Option(help="YAML file of workers and their layers.", envvar="LAMINA_SPLIT_FILE")
]
DEFAULT_CONTEXT = 4096
Context = Annotated[
    str,
    typer.Option(
        help=f"Most tokens of one sequence, like 8K; {DEFAULT_CONTEXT} by default, the model's own at most.",
        envvar="LAMINA_CONTEXT",
    ),
]
Parallel = Annotated[
    int, typer.Option(help="Sequences that run at the same time.", envvar="LAMINA_PARALLEL", min=1, max=4096)
]
KvDtype = Annotated[str, one_of(KV_DTYPES, "KV cache type: ", "LAMINA_KV_DTYPE")]
WireDtype = Annotated[str, one_of(WIRE_DTYPES, "Type of activations between stages: ", "LAMINA_WIRE_DTYPE")]
CudaGraphs = Annotated[str, one_of(GRAPH_MODES, "CUDA graphs on workers that leave it open: ", "LAMINA_CUDA_GRAPHS")]
MaxRows = Annotated[
    int, typer.Option(help="Tokens in one step (the prefill budget).", envvar="LAMINA_MAX_ROWS", min=1, max=MAX_ROWS)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", envvar="LAMINA_JSON")]

NO_WORKERS = "no workers: start `rpc-worker` on each machine and name them with --workers host:port,…"


def parse_count(text: str, option: str) -> int:
    """A number of tokens like 4096, 8K or 128k. Raises InvalidConfig."""
    match = re.fullmatch(r"(\d{1,9})([kKmM]?)", text.strip())
    if not match or int(match[1]) == 0:
        raise InvalidConfig(f"{option} {text!r} is not a number of tokens like 4096 or 8K")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def parse_workers(text: str) -> tuple[Address, ...]:
    """Addresses of a comma-separated list. Raises InvalidConfig."""
    addresses = tuple(parse_address(part) for part in text.split(",")) if text.strip() else ()
    if len(set(addresses)) != len(addresses):
        raise InvalidConfig(f"--workers {text!r} names a worker twice")
    return addresses


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of a comma-separated list of sizes. Raises InvalidConfig."""
    return tuple(parse_size(part) for part in text.split(","))


def split_choice(split: str, split_file: Path | None) -> SplitChoice:
    """The split that the options ask for. Raises InvalidSplit or InvalidConfig."""
    return SplitChoice(parse_split(split) if split else None, split_file)


def stage_settings(
    model_context: int,
    context: str,
    parallel: int,
    kv_dtype: str,
    wire_dtype: str,
    max_rows: int,
    cuda_graphs: str = "auto",
) -> StageSettings:
    """Settings of every stage. Raises InvalidConfig, for a context beyond the model's as well."""
    wanted = parse_count(context, "--context") if context else min(DEFAULT_CONTEXT, model_context)
    if wanted > model_context:
        raise InvalidConfig(f"--context {wanted} is more than the {model_context} tokens that this model was made for")
    return StageSettings(
        max_rows=max_rows,
        max_seqs=parallel,
        max_logit_rows=parallel,
        max_context=wanted,
        kv_dtype=kv_dtype,
        wire_dtype=wire_dtype,
        cuda_graphs=cuda_graphs.lower(),
    )


def take_any_text() -> None:
    """What standard input and output cannot encode is replaced: a terminal's language is no reason to stop."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def read_prompt() -> str:
    """Standard input as text. Raises InvalidRequest if it is empty or not UTF-8."""
    if sys.stdin is None:  # closed
        raise InvalidRequest("there is no prompt: give it as an argument or on standard input")
    if sys.stdin.isatty():
        print("the prompt comes from standard input; end it with Ctrl-D", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    if not text.strip():
        raise InvalidRequest("the prompt is empty: give it as an argument or on standard input")
    return text


def is_interactive() -> bool:
    """Whether progress bars make sense on standard error."""
    return os.isatty(2) and os.environ.get("TERM") != "dumb"
