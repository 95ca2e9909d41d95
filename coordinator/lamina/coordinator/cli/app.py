"""The commands and their options; each hands frozen settings to its module."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from lamina.coordinator.cli import bench, options, server_commands
from lamina.coordinator.cli.config_file import Config
from lamina.coordinator.cli.plan import plan_offline, plan_online, print_plan
from lamina.coordinator.cli.run import RunRequest
from lamina.coordinator.cli.run import run as run_prompt
from lamina.coordinator.model_file import ModelFile, open_model_file
from lamina.coordinator.session import SessionSettings
from lamina.spec.errors import InvalidConfig, LaminaError
from lamina.spec.sampling import SamplingParams
from lamina.wire.version import own_version

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# Plain help: in 80 columns the boxes of rich would cut long flags and their variables short.
app = typer.Typer(pretty_exceptions_enable=False, no_args_is_help=True, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(own_version())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run one large language model over several unequal machines."""


@app.command()
def run(
    model: options.Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; standard input if not given.", show_default=False)] = "",
    workers: options.Workers = "",
    split: options.Split = "",
    split_file: options.SplitFile = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy.", envvar="LAMINA_TEMPERATURE")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = off.", envvar="LAMINA_TOP_K")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off.", envvar="LAMINA_TOP_P")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.", envvar="LAMINA_SEED")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", envvar="LAMINA_MAX_TOKENS", min=1)] = 512,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Through the chat template, or as it stands.", envvar="LAMINA_CHAT")
    ] = True,
    context: options.Context = "",
    kv_dtype: options.KvDtype = "f16",
    wire_dtype: options.WireDtype = "f32",
    cuda_graphs: options.CudaGraphs = "auto",
    max_rows: options.MaxRows = 512,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer.", envvar="LAMINA_QUIET")] = False,
    config: Config = None,
) -> None:
    """Answer one prompt with the model split over the workers."""
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    opened = open_model_file(model)
    settings = _session_settings(
        opened, workers, split, split_file, context, 1, kv_dtype, wire_dtype, max_rows, cuda_graphs
    )
    if not settings.workers and split_file is None:
        raise InvalidConfig(options.NO_WORKERS)
    text = prompt or options.read_prompt()
    asyncio.run(run_prompt(opened, settings, RunRequest(text, sampling, max_tokens, chat, quiet)))


@app.command()
def plan(
    model: options.Model,
    workers: options.Workers = "",
    memory: Annotated[
        str,
        typer.Option(
            help="Assume devices of these sizes instead of asking workers, like 24G,8G.",
            envvar="LAMINA_MEMORY",
            show_default=False,
        ),
    ] = "",
    split: options.Split = "",
    split_file: options.SplitFile = None,
    context: options.Context = "",
    parallel: options.Parallel = 1,
    kv_dtype: options.KvDtype = "f16",
    max_rows: options.MaxRows = 512,
    as_json: options.Json = False,
    config: Config = None,
) -> None:
    """Show what a split would cost in bytes; loads nothing. For `serve`, give it the same --parallel (8 there)."""
    opened = open_model_file(model)
    settings = _session_settings(opened, workers, split, split_file, context, parallel, kv_dtype, "f32", max_rows)
    if memory or not (settings.workers or split_file is not None):  # LAMINA_WORKERS may be exported; --memory is asked
        if not memory:
            print("neither --workers nor --memory: devices without a limit are assumed", file=sys.stderr)
        stages = plan_offline(opened, settings, options.parse_sizes(memory) if memory else None)
    else:
        stages = asyncio.run(plan_online(opened, settings))
    print_plan(opened, settings, stages, as_json=as_json)


server_commands.register(app)
app.add_typer(bench.app, name="bench")


def _session_settings(
    model: ModelFile,
    workers: str,
    split: str,
    split_file: Path | None,
    context: str,
    parallel: int,
    kv_dtype: str,
    wire_dtype: str,
    max_rows: int,
    cuda_graphs: str = "auto",
) -> SessionSettings:
    stage = options.stage_settings(
        model.spec.context_length, context, parallel, kv_dtype, wire_dtype, max_rows, cuda_graphs
    )
    return SessionSettings(
        workers=options.parse_workers(workers),
        split=options.split_choice(split, split_file),
        stage=stage,
        num_tokens=stage.max_context * parallel,
    )


def main() -> None:
    """Entry point: a LaminaError is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    try:
        app()
    except LaminaError as error:
        print(f"coordinator: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever read the answer went away
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:  # a full disk behind standard output
        print(f"coordinator: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
