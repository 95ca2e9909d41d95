"""The command `rpc-worker`: flags and their LAMINA_* twins into frozen settings, user errors into one line."""

import logging
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from lamina.kernels.registry import present_devices
from lamina.rpc_worker.daemon import run_worker
from lamina.rpc_worker.numerics import COMPUTE_DTYPES
from lamina.rpc_worker.settings import WorkerSettings, parse_devices, parse_edge_port
from lamina.spec.address import parse_address
from lamina.spec.errors import InvalidConfig, LaminaError
from lamina.spec.placement import GRAPH_MODES
from lamina.spec.sizes import parse_size
from lamina.wire.event_loop import run
from lamina.wire.version import own_version

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
_LOG_LEVELS = ("debug", "info", "warning", "error")

app = typer.Typer(add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(own_version())
        raise typer.Exit


@app.command()
def worker(
    device: Annotated[
        list[str],
        typer.Option(help="cpu, cuda, cuda:N; repeat for several devices. cpu by default.", envvar="LAMINA_DEVICE"),
    ] = [],  # noqa: B006 (typer copies it)
    listen: Annotated[
        str, typer.Option(help="host:port to serve on; port 0 picks a free one.", envvar="LAMINA_LISTEN")
    ] = "127.0.0.1:50051",
    advertise: Annotated[
        str, typer.Option(help="host:port under which others reach this worker.", envvar="LAMINA_ADVERTISE")
    ] = "",
    edge_port: Annotated[
        str,
        typer.Option(
            help="Port where other workers' frames come in, on the host of --listen: a number, any, or none (through"
            " gRPC then, which is slower).",
            envvar="LAMINA_EDGE_PORT",
        ),
    ] = "any",
    join: Annotated[
        str, typer.Option(help="host:port of a coordinator that waits for workers.", envvar="LAMINA_JOIN")
    ] = "",
    threads: Annotated[
        int, typer.Option(help="Compute threads of a CPU device; 0 = all usable cores.", envvar="LAMINA_THREADS")
    ] = 0,
    max_memory: Annotated[
        str, typer.Option(help="Most memory to use per device, like 8G.", envvar="LAMINA_MAX_MEMORY")
    ] = "",
    models: Annotated[
        list[Path], typer.Option(help="Folder with model files; repeatable.", envvar="LAMINA_MODELS")
    ] = [],  # noqa: B006
    name: Annotated[
        str, typer.Option(help="Name of this worker; the host name by default.", envvar="LAMINA_NAME")
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen beyond loopback without TLS or token.", envvar="LAMINA_INSECURE"),
    ] = False,
    cuda_graphs: Annotated[
        str,
        typer.Option(
            help=f"Replay steps as CUDA graphs: {', '.join(GRAPH_MODES)}; auto decides by card.",
            envvar="LAMINA_CUDA_GRAPHS",
        ),
    ] = "auto",
    compute_dtype: Annotated[
        str,
        typer.Option(
            help=f"Type of large matrix products: {', '.join(COMPUTE_DTYPES)}; where a device has it.",
            envvar="LAMINA_COMPUTE_DTYPE",
        ),
    ] = "auto",
    log_level: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(_LOG_LEVELS)}; info, but warning with --self-test and --explain.",
            envvar="LAMINA_LOG_LEVEL",
            show_default=False,
        ),
    ] = "",
    trace_directory: Annotated[
        Path | None,
        typer.Option(
            help="Folder for Chrome traces (for Perfetto); steps then run op by op, and slower.",
            envvar="LAMINA_TRACE_DIRECTORY",
            show_default=False,
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Compare the devices (all there are) with the reference, and exit.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which kernels the devices (all there are) run and why, and exit.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="GGUF file for --self-test or --explain.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with --self-test or --explain.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve this machine's devices to a lamina coordinator."""
    if not (self_test or explain) and (model is not None or as_json):
        raise InvalidConfig("--model and --json go with --self-test or --explain: a coordinator says what to serve")
    settings = WorkerSettings(
        name=name or socket.gethostname().split(".")[0],
        devices=parse_devices(tuple(device) or ("cpu",)),
        listen=parse_address(listen, allow_zero=True),
        advertise=parse_address(advertise) if advertise else None,
        edge_port=parse_edge_port(edge_port),
        join=parse_address(join) if join else None,
        num_threads=threads or None,
        max_memory_bytes=parse_size(max_memory) if max_memory else None,
        model_folders=tuple(models),
        insecure=insecure,
        log_level=_checked_level(log_level or ("warning" if self_test or explain else "info")),
        cuda_graphs=cuda_graphs.lower(),
        compute_dtype=compute_dtype.lower(),
        trace_directory=trace_directory,
    )
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if self_test or explain:
        from lamina.rpc_worker.checkup import run_checkup  # a worker starts without the reference, gguf and tables

        names = settings.devices if device else present_devices()
        raise typer.Exit(run_checkup(settings, names, model, test=self_test, as_json=as_json))
    run(run_worker(settings))


def _checked_level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise InvalidConfig(f"--log-level {text!r} is none of {', '.join(_LOG_LEVELS)}")
    return text.lower()


def main() -> None:
    """Run the command: a LaminaError is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    try:
        app()
    except LaminaError as error:
        print(f"rpc-worker: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except OSError as error:  # a full disk behind standard output
        print(f"rpc-worker: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:  # before the daemon takes signals
        sys.exit(EXIT_INTERRUPTED)
