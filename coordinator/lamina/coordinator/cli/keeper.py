"""Keeps the model up behind `coordinator serve`: opens a session, waits for its end, opens the next.

Owns who carries the model. At first all workers that were named, or as many joined ones as were asked for. After a loss
as many as held layers, as soon as they answer; those that are left, once the lost one has been gone for long enough. A
placement that runs is left alone, whoever comes back.
"""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from rich.console import Console

from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.state import Draining, Loading, Lost, Ready, StageProgress
from lamina.coordinator.cli.options import is_interactive
from lamina.coordinator.cli.progress import IDLE_REMEDY, LoadBars, connecting_line, idle_line, split_table
from lamina.coordinator.cluster.attendance import Attendance, call_roll
from lamina.coordinator.cluster.client import LoadProgress, StageLoaded
from lamina.coordinator.cluster.membership import HEARTBEAT_S, JoinServer
from lamina.coordinator.engine.engine import CURABLE, Engine
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.planner.memory import StagePlan
from lamina.coordinator.session import Report, Session, SessionSettings, addresses_of, open_session
from lamina.coordinator.telemetry.cluster_watch import idle_workers
from lamina.spec.address import Address
from lamina.spec.errors import LaminaError, Unavailable, WorkerLost, WorkerUnreachable
from lamina.spec.ids import WorkerName
from lamina.wire.event_loop import leave_to_stay

_log = logging.getLogger(__name__)
_RETRY_S = 2.0


class Keeper:
    """Brings the model up for as long as the server lives; open requests wait for that, up to `recover_s`."""

    def __init__(
        self,
        model: ModelFile,
        settings: SessionSettings,
        service: InferenceService,
        console: Console,
        recover_s: float,
        replan_after_s: float,
    ) -> None:
        self._model = model
        self._settings = settings
        self._service = service
        self._console = console
        self._recover_s = recover_s
        self._replan_after_s = replan_after_s
        self._progress: dict[int, StageProgress] = {}
        self._holders: dict[Address, WorkerName] = {}  # who held layers when the model was up last
        self._has_served = False
        self._lost_s = 0.0  # when it was lost
        self._ended_by: LaminaError | None = None  # the last session
        self._gone = ""  # the workers that the present attempt does without
        self._told = ""  # the last line about a failure
        self._num_joined = -1  # of the workers to wait for, as last logged
        self._suspended: Engine | None = None
        self._giving_up: asyncio.Task[None] | None = None

    async def keep(self, joins: JoinServer | None, num_workers: int) -> None:
        """For ever. Raises what waiting cannot cure, if the model has never been up."""
        try:
            while True:
                try:
                    workers = await self._gather(joins, num_workers)
                    await self._serve_once(replace(self._settings, workers=workers), joins)
                except LaminaError as error:
                    if not self._has_served and not isinstance(error, CURABLE):
                        raise
                    self._ended_by = self._ended_by or error
                    self._tell_failure(error)
                await asyncio.sleep(_RETRY_S)
        finally:
            self._stop_giving_up()
            if self._suspended is not None:
                self._suspended.abandon(Unavailable("the server is shutting down"))

    # -- who carries the model

    async def _gather(self, joins: JoinServer | None, num_workers: int) -> tuple[Address, ...]:
        if self._has_served:
            return await self._gather_again(joins)
        if joins is None:
            return addresses_of(self._settings)
        members = await joins.wait_for(num_workers, partial(self._wait_for_joins, num_workers, joins.address))
        return tuple(member.address for member in members)

    async def _gather_again(self, joins: JoinServer | None) -> tuple[Address, ...]:
        """After a loss: as many as held layers, whoever they are; later those that answer, if there is a choice."""
        is_free = self._settings.split.file is None
        while True:
            roll = await call_roll(self._known(joins))
            self._gone = self._who_is_gone(roll)
            is_late = time.monotonic() >= self._lost_s + self._replan_after_s
            if len(roll.present) >= (1 if is_late and is_free else len(self._holders)):
                return tuple(roll.present)
            if not is_free:
                self._tell(f"{self._gone}: start it again, --split-file gives its layers to nobody else")
            elif is_late:
                self._tell(f"{self._gone}: start it again")
            else:
                wait = f"{self._replan_after_s:g} s after the loss"
                self._tell(f"{self._gone}; {wait} the others take over, if they have room")
            await asyncio.sleep(HEARTBEAT_S)

    def _known(self, joins: JoinServer | None) -> tuple[Address, ...]:
        if joins is None:
            return addresses_of(self._settings)
        return tuple(member.address for member in joins.membership.present(time.monotonic()))

    def _who_is_gone(self, roll: Attendance) -> str:
        """Those of the last holders of layers that are not there, with what is the matter; "" if all are."""
        present = {profile.name for profile in roll.present.values()}
        gone = {address: name for address, name in self._holders.items() if name not in present}
        return "; ".join(_complaint(name, address, roll.absent.get(address)) for address, name in gone.items())

    # -- a session

    async def _serve_once(self, settings: SessionSettings, joins: JoinServer | None) -> None:
        """Open a session and serve until its pipeline ends, which it raises."""
        self._progress = {}
        async with AsyncExitStack() as stack:
            with (
                connecting_line(self._console, settings.workers, quiet=bool(self._told)) as has_connected,
                LoadBars(self._console, quiet=False, interactive=is_interactive()) as show,
            ):

                def show_split(stages: tuple[StagePlan, ...]) -> None:
                    has_connected()
                    self._show_split(stages)

                session = await stack.enter_async_context(
                    open_session(
                        self._model,
                        settings,
                        show_split,
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
                self._lost_s = time.monotonic()
                if session.engine.is_suspended:
                    self._suspended = session.engine
                    self._giving_up = asyncio.create_task(self._give_up_later(session.engine, error))
                raise error
            finally:
                watching.cancel()
                self._service.cluster.lose_all()  # before their connections are closed

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
        self._has_served, self._ended_by, self._gone, self._told = True, None, "", ""
        placement = session.pipeline.placement
        names = {stage.device.worker for stage in placement.stages}
        self._holders = {w.address: w.profile.name for w in session.workers if w.profile.name in names}
        self._service.cluster.follow(session.workers, placement, session.pipeline.link_rtts_s)
        await self._service.cluster.look()  # so that whoever asks next sees the stages
        leave_to_stay()
        self._set_state(Ready(session.engine))
        self._console.print("ready")

    async def _watch_idle(self, session: Session, joins: JoinServer | None) -> None:
        """For ever: say which workers hold no layers, those that come or come back after the split among them."""
        served = {client.profile.name: client.address for client in session.workers}
        left_out = [] if joins else [a for a in addresses_of(self._settings) if a not in served.values()]
        told: frozenset[WorkerName] = frozenset()
        while True:
            if joins is not None:
                others = {member.name: member.address for member in joins.membership.present(time.monotonic())}
            else:
                others = {profile.name: a for a, profile in (await call_roll(left_out)).present.items()}
            self._service.cluster.absent = tuple(a for a in left_out if a not in others.values())
            idle = idle_workers(session.pipeline.placement, served | others)
            for name in idle.keys() - told:
                _log.warning("%s: %s", idle_line(name, idle[name]), IDLE_REMEDY)
            told = frozenset(idle)
            self._service.cluster.idle = idle
            await asyncio.sleep(HEARTBEAT_S)

    # -- what is said of it

    def _show_split(self, stages: tuple[StagePlan, ...]) -> None:
        if self._gone:
            names = dict.fromkeys(stage.device.id.worker for stage in stages)
            _log.warning("%s; its layers go to %s", self._gone, ", ".join(names))
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

    def _tell_failure(self, error: LaminaError) -> None:
        """Of an attempt or of a session; figures that change from one attempt to the next are no news."""
        if self._gone and not isinstance(error, CURABLE):
            self._tell(f"{self._gone}: start it again. Without it {error}", news=f"{self._gone}, {type(error)}")
        else:
            self._tell(f"{error}; trying again every {_RETRY_S:g} s", news=str(error))

    def _tell(self, what: str, *, news: str = "") -> None:
        """What the API answers from now on; a line of the log if it is `news`, which is `what` itself by default."""
        if (news or what) != self._told:
            self._told = news or what
            _log.warning("%s", what)
        self._wait_for(what)

    def _wait_for(self, what: str) -> None:
        self._set_state(Lost(what) if self._has_served else Loading(waiting_for=what))

    def _wait_for_joins(self, num_wanted: int, at: Address, num_joined: int) -> None:
        what = f"{num_wanted} worker(s) to join at {at}: {num_joined} of {num_wanted} have"
        if num_joined != self._num_joined:
            self._num_joined = num_joined
            _log.info("waiting for %s", what)
        self._wait_for(what)

    def _set_state(self, state: Loading | Ready | Lost) -> None:
        if not isinstance(self._service.state, Draining):
            self._service.state = state


def _complaint(name: WorkerName, address: Address, error: LaminaError | None) -> str:
    if error is None or isinstance(error, WorkerUnreachable):
        return f"worker {name} at {address} does not answer"
    return str(error)
