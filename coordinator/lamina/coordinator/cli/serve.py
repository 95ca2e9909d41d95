"""`coordinator serve`: the HTTP API from the first second, the model behind it as soon and as long as workers allow.

Owns the life of the server: announce, serve, drain, stop. The model is the keeper's.
"""

import asyncio
import logging
import signal
import sys
import time

from lamina.coordinator.api.app import create_app
from lamina.coordinator.api.served_model import ServedModel
from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.state import Draining
from lamina.coordinator.cli.announcement import announcement
from lamina.coordinator.cli.http_server import HttpServer, address_of, allow_open_files, bind
from lamina.coordinator.cli.keeper import Keeper
from lamina.coordinator.cli.progress import plain_console
from lamina.coordinator.cli.serve_settings import ServeSettings
from lamina.coordinator.cluster.membership import JoinServer
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.session import SessionSettings, addresses_of
from lamina.coordinator.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_DRAIN_POLL_S = 0.05
# Templates are rendered in threads; they must not hold the interpreter for the default 5 ms while tokens wait.
_SWITCH_INTERVAL_S = 0.0005


async def serve(model: ModelFile, session: SessionSettings, settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises InvalidConfig and what makes the model impossible on these workers."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    stop, hurry = asyncio.Event(), asyncio.Event()
    _install_signal_handlers(stop, hurry)
    served = ServedModel(
        settings.model_name,
        model.tokenizer,
        model.chat,
        session.stage.max_context,
        model.spec.context_length,
        created_s=int(time.time()),
    )
    service = InferenceService(served, Metrics())
    allow_open_files(settings.max_connections)
    bound = bind(settings.listen)
    server = HttpServer(create_app(service, settings.api), bound, settings.max_connections)
    console = plain_console(stderr=True)
    keeper = Keeper(model, session, service, console, settings.recover_s, settings.replan_after_s)
    joins = None if addresses_of(session) else await JoinServer.start(settings.join_listen)
    for line in announcement(settings.model_name, address_of(bound), joins.address if joins else None):
        console.print(line, soft_wrap=True)
    serving = asyncio.create_task(server.run_on_sockets())
    keeping = asyncio.create_task(keeper.keep(joins, settings.num_workers))
    watching = asyncio.create_task(service.cluster.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await _drain(service, settings.drain_s, hurry)
    finally:
        server.should_exit = True
        for task in (watching, stopping, keeping):
            task.cancel()
        await asyncio.gather(serving, watching, stopping, return_exceptions=True)
        if joins is not None:
            await joins.close()
        service.close()
    try:
        await keeping  # takes the session down; raises what made the model impossible
    except asyncio.CancelledError:
        _log.info("stopped")


async def _drain(service: InferenceService, deadline_s: float, hurry: asyncio.Event) -> None:
    """Take nothing new, let what runs end."""
    service.state = Draining()
    end_s = time.monotonic() + deadline_s
    if service.num_active:
        _log.info("finishing %d request(s), at most %g s; signal again to stop at once", service.num_active, deadline_s)
    while service.num_active and time.monotonic() < end_s and not hurry.is_set():
        await asyncio.sleep(_DRAIN_POLL_S)


def _install_signal_handlers(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
