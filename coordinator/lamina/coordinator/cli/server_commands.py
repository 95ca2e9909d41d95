"""The commands around the HTTP server and their options: serve, chat, status, devices."""

import logging
import sys
from typing import Annotated

import typer

from lamina.coordinator.api.settings import MAX_BODY_BYTES, MAX_CONNECTIONS, PING_S, ApiSettings
from lamina.coordinator.cli import options
from lamina.coordinator.cli.chat import ChatSettings
from lamina.coordinator.cli.chat import chat as run_chat
from lamina.coordinator.cli.client import DEFAULT_URL, ApiKey, ServerClient, Url
from lamina.coordinator.cli.config_file import Config
from lamina.coordinator.cli.serve_settings import ServeSettings
from lamina.coordinator.cli.status import show_devices, show_status
from lamina.coordinator.engine.policy import ADMISSIONS, POLICIES
from lamina.coordinator.model_file import open_model_file
from lamina.coordinator.session import SchedulingChoice, SessionSettings
from lamina.spec.address import Address, parse_address
from lamina.spec.errors import InvalidConfig
from lamina.spec.sizes import parse_size
from lamina.wire.event_loop import run

_JOIN_LISTEN = "127.0.0.1:50050"
_LOG_LEVELS = ("debug", "info", "warning", "error")


def serve(
    model: options.Model,
    workers: options.Workers = "",
    split: options.Split = "",
    split_file: options.SplitFile = None,
    context: options.Context = "",
    parallel: options.Parallel = 8,
    kv_dtype: options.KvDtype = "f16",
    wire_dtype: options.WireDtype = "f32",
    cuda_graphs: options.CudaGraphs = "auto",
    max_rows: options.MaxRows = 512,
    host: Annotated[str, typer.Option(help="Where to listen for HTTP.", envvar="LAMINA_HOST")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="HTTP port; 0 picks a free one.", envvar="LAMINA_PORT", min=0, max=65535)
    ] = 8080,
    api_key: Annotated[
        str, typer.Option(help="Key that requests must bring; /health and the page need none.", envvar="LAMINA_API_KEY")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without a key.", envvar="LAMINA_INSECURE")
    ] = False,
    model_name: Annotated[
        str, typer.Option(help="Name of the model in the API; the file's by default.", envvar="LAMINA_MODEL_NAME")
    ] = "",
    join_listen: Annotated[
        str,
        typer.Option(help="host:port for `rpc-worker --join`, without --workers.", envvar="LAMINA_JOIN_LISTEN"),
    ] = _JOIN_LISTEN,
    num_workers: Annotated[
        int, typer.Option(help="Workers to wait for, without --workers.", envvar="LAMINA_NUM_WORKERS", min=1)
    ] = 1,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Keep the KV of prompts for later ones.", envvar="LAMINA_ENABLE_PREFIX_CACHING")
    ] = True,
    admission: Annotated[
        str, options.one_of(ADMISSIONS, "When a request may start: ", "LAMINA_ADMISSION")
    ] = "optimistic",
    policy: Annotated[str, options.one_of(POLICIES, "Who is prefilled first: ", "LAMINA_POLICY")] = "fcfs",
    prefill_chunk_tokens: Annotated[
        int,
        typer.Option(help="Most prompt tokens of one request in a step.", envvar="LAMINA_PREFILL_CHUNK_TOKENS", min=1),
    ] = 512,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more get 429.", envvar="LAMINA_MAX_WAITING", min=1)
    ] = 256,
    max_body: Annotated[
        str, typer.Option(help="Largest request body, like 16M.", envvar="LAMINA_MAX_BODY")
    ] = f"{MAX_BODY_BYTES // 2**20}M",
    max_connections: Annotated[
        int,
        typer.Option(
            help="HTTP connections served at a time; further ones get 503.", envvar="LAMINA_MAX_CONNECTIONS", min=1
        ),
    ] = MAX_CONNECTIONS,
    ping_s: Annotated[
        float, typer.Option(help="Seconds of silence before a stream is pinged.", envvar="LAMINA_PING_S", min=0.1)
    ] = PING_S,
    drain_s: Annotated[
        float, typer.Option(help="Seconds that running requests get at the end.", envvar="LAMINA_DRAIN_S", min=0)
    ] = 30.0,
    recover_s: Annotated[
        float,
        typer.Option(help="Seconds that open requests wait for a lost worker.", envvar="LAMINA_RECOVER_S", min=0),
    ] = 60.0,
    replan_after_s: Annotated[
        float,
        typer.Option(
            help="Seconds that a lost worker has to come back before the others take its layers over.",
            envvar="LAMINA_REPLAN_AFTER_S",
            min=0,
        ),
    ] = 10.0,
    log_level: Annotated[str, options.one_of(_LOG_LEVELS, "One of ", "LAMINA_LOG_LEVEL")] = "info",
    config: Config = None,
) -> None:
    """Serve the model over an OpenAI-compatible HTTP API until SIGTERM."""
    # Here, because the web framework takes longer to import than the other commands to run.
    from lamina.coordinator.cli.serve import serve as run_server

    _start_logging(log_level)
    if workers and join_listen != _JOIN_LISTEN:
        raise InvalidConfig("--join-listen is for a server without --workers or LAMINA_WORKERS: leave one of them out")
    opened = open_model_file(model)
    stage = options.stage_settings(
        opened.spec.context_length, context, parallel, kv_dtype, wire_dtype, max_rows, cuda_graphs
    )
    session = SessionSettings(
        workers=options.parse_workers(workers),
        split=options.split_choice(split, split_file),
        stage=stage,
        num_tokens=stage.max_context * parallel,
        scheduling=SchedulingChoice(admission, policy, enable_prefix_caching, prefill_chunk_tokens, max_waiting),
    )
    settings = ServeSettings(
        listen=Address(host, port),
        api=ApiSettings(api_key, parse_size(max_body), ping_s),
        insecure=insecure,
        model_name=model_name or model.stem,
        join_listen=parse_address(join_listen, allow_zero=True),
        num_workers=num_workers,
        max_connections=max_connections,
        drain_s=drain_s,
        recover_s=recover_s,
        replan_after_s=replan_after_s,
    )
    run(run_server(opened, session, settings))


def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    system: Annotated[str, typer.Option(help="System message.", envvar="LAMINA_SYSTEM")] = "",
    temperature: Annotated[float, typer.Option(help="0 = greedy.", envvar="LAMINA_TEMPERATURE", min=0)] = 0.7,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer; 0 = no limit.", envvar="LAMINA_MAX_TOKENS", min=0)
    ] = 0,
    config: Config = None,
) -> None:
    """Talk to a running server."""
    if not run_chat(ServerClient(url, api_key), ChatSettings(system, temperature, max_tokens or None)):
        raise typer.Exit(1)


def status(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: options.Json = False, config: Config = None) -> None:
    """Show the state of a running server: stages, load, how busy."""
    show_status(ServerClient(url, api_key), as_json=as_json)


def devices(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: options.Json = False, config: Config = None) -> None:
    """Show the devices of a running server's workers."""
    show_devices(ServerClient(url, api_key), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (serve, chat, status, devices):
        app.command()(command)


def _start_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
