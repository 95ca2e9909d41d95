"""`coordinator serve`: the HTTP API from the first second, the model behind it as soon and as long as workers allow.

Owns the life of the server: bring up, announce, notice a lost pipeline and bring it up again, drain, stop.
"""

import asyncio
import logging
import signal
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from rich.console import Console

from lamina.coordinator.api.app import create_app
from lamina.coordinator.api.served_model import ServedModel
from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.state import Draining, Loading, Lost, Ready, StageProgress
from lamina.coordinator.cli.announcement import announcement
from lamina.coordinator.cli.http_server import HttpServer, address_of, bind
from lamina.coordinator.cli.options import is_interactive
from lamina.coordinator.cli.progress import LoadBars, idle_line, split_table
from lamina.coordinator.cli.serve_settings import ServeSettings
from lamina.coordinator.cluster.client import LoadProgress, StageLoaded
from lamina.coordinator.cluster.membership import HEARTBEAT_S, JoinServer
from lamina.coordinator.engine.engine import CURABLE, Engine
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.planner.memory import StagePlan
from lamina.coordinator.session import Report, Session, SessionSettings, addresses_of, open_session
from lamina.coordinator.telemetry.cluster_watch import idle_workers
from lamina.coordinator.telemetry.metrics import Metrics
from lamina.spec.address import Address
from lamina.spec.errors import LaminaError, Unavailable, WorkerLost
from lamina.spec.ids import WorkerName

_log = logging.getLogger(__name__)
_RETRY_S = 2.0
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
    bound = bind(settings.listen)
    server = HttpServer(create_app(service, settings.api), bound)
    console = Console(stderr=True, width=None if is_interactive() else 110)
    keeper = _Keeper(model, session, service, console, settings.recover_s)
    joins = None if addresses_of(session) else await JoinServer.start(settings.join_listen)
    for line in announcement(settings.model_name, address_of(bound), joins.address if joins else None):
        console.print(line, highlight=False, soft_wrap=True)
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


class _Keeper:
    """Keeps a session up: opens it, waits for its end, opens it again; open requests wait for that, up to recover_s."""

    def __init__(
        self,
        model: ModelFile,
        settings: SessionSettings,
        service: InferenceService,
        console: Console,
        recover_s: float,
    ) -> None:
        self._model = model
        self._settings = settings
        self._service = service
        self._console = console
        self._progress: dict[int, StageProgress] = {}
        self._has_served = False
        self._ended_by: LaminaError | None = None  # the last session
        self._recover_s = recover_s
        self._suspended: Engine | None = None
        self._giving_up: asyncio.Task[None] | None = None

    async def keep(self, joins: JoinServer | None, num_workers: int) -> None:
        """For ever. Raises what waiting cannot cure, if the model has never been up."""
        try:
            await self._keep(joins, num_workers)
        finally:
            self._stop_giving_up()
            if self._suspended is not None:
                self._suspended.abandon(Unavailable("the server is shutting down"))

    async def _keep(self, joins: JoinServer | None, num_workers: int) -> None:
        while True:
            settings = self._settings
            if joins is not None:
                members = await joins.wait_for(num_workers, partial(self._wait_for_joins, num_workers, joins.address))
                settings = replace(settings, workers=tuple(member.address for member in members))
            try:
                await self._serve_once(settings, joins)
            except LaminaError as error:
                if not self._has_served and not isinstance(error, CURABLE):
                    raise
                _log.warning("%s; trying again every %g s", error, _RETRY_S)
                self._ended_by = self._ended_by or error
                self._wait_for(str(error))
            self._service.cluster.lose_all()
            await asyncio.sleep(_RETRY_S)

    async def _serve_once(self, settings: SessionSettings, joins: JoinServer | None) -> None:
        """Open a session and serve until its pipeline ends, which it raises."""
        self._progress = {}
        async with AsyncExitStack() as stack:
            with LoadBars(self._console, quiet=False, interactive=is_interactive()) as show:
                session = await stack.enter_async_context(
                    open_session(
                        self._model,
                        settings,
                        self._show_split,
                        self._report_to(show),
                        keeps_requests=self._recover_s > 0,
                        suspended=self._suspended,
                    )
                )
            self._stop_giving_up()
            self._suspended = None
            await self._take_over(session)
            watching = asyncio.create_task(self._watch_idle(session, joins))
            try:
                error = await session.engine.wait_for_failure()
                if session.engine.is_suspended:
                    self._suspended = session.engine
                    self._giving_up = asyncio.create_task(self._give_up_later(session.engine, error))
                raise error
            finally:
                watching.cancel()

    async def _give_up_later(self, engine: Engine, error: LaminaError) -> None:
        if self._service.num_active:
            open_ = self._service.num_active
            _log.warning("%d open request(s) wait up to %g s for the model to be back", open_, self._recover_s)
        await asyncio.sleep(self._recover_s)
        engine.abandon(WorkerLost(f"{error}; the model was not back within {self._recover_s:g} s"))

    def _stop_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    async def _take_over(self, session: Session) -> None:
        if self._has_served and self._ended_by is not None:
            self._service.metrics.count_replan(self._ended_by)
        self._has_served, self._ended_by = True, None
        placement = session.pipeline.placement
        self._service.cluster.follow(session.workers, placement, session.pipeline.link_rtts_s)
        await self._service.cluster.look()  # so that whoever asks next sees the stages
        self._set_state(Ready(session.engine))
        self._console.print("ready", highlight=False)

    async def _watch_idle(self, session: Session, joins: JoinServer | None) -> None:
        """For ever: say which workers hold no layers, those that join after the split among them."""
        known = {client.profile.name: client.address for client in session.workers}
        told: frozenset[WorkerName] = frozenset()
        while True:
            members = joins.membership.present(time.monotonic()) if joins is not None else ()
            idle = idle_workers(session.pipeline.placement, known | {m.name: m.address for m in members})
            for name in idle.keys() - told:
                _log.warning("%s until the model is split anew, at the next start", idle_line(name, idle[name]))
            told = frozenset(idle)
            self._service.cluster.idle = idle
            await asyncio.sleep(HEARTBEAT_S)

    def _show_split(self, stages: tuple[StagePlan, ...]) -> None:
        self._console.print(split_table(stages, self._settings))

    def _report_to(self, show: Report) -> Report:
        def report(event: LoadProgress | StageLoaded) -> None:
            show(event)
            stage = event.stage
            known = self._progress.get(stage.index)
            total = event.total_bytes if isinstance(event, LoadProgress) else known.total_bytes if known else 0
            done = event.done_bytes if isinstance(event, LoadProgress) else total
            progress = StageProgress(stage.index, stage.device.worker, str(stage.layers), done, total)
            self._progress[stage.index] = progress
            self._set_state(Loading(dict(self._progress)))

        return report

    def _wait_for(self, what: str) -> None:
        self._set_state(Lost(what) if self._has_served else Loading(waiting_for=what))

    def _wait_for_joins(self, num_wanted: int, at: Address, num_joined: int) -> None:
        self._wait_for(f"{num_wanted} worker(s) to join at {at}: {num_joined} of {num_wanted} have")

    def _set_state(self, state: Loading | Ready | Lost) -> None:
        if not isinstance(self._service.state, Draining):
            self._service.state = state


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
