"""What state the served model is in: a union whose members carry their own data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.coordinator.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Bytes of one stage read so far."""

    stage: int
    worker: str
    layers: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loading:
    """The model is coming up; `waiting_for` says what hinders it, "" if nothing does."""

    stages: Mapping[int, StageProgress] = field(default_factory=dict)
    waiting_for: str = ""

    @property
    def progress(self) -> float:
        """Share of the weights read, 0 to 1."""
        total = sum(stage.total_bytes for stage in self.stages.values())
        return sum(stage.done_bytes for stage in self.stages.values()) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """Requests are served by this engine."""

    engine: Engine


@dataclass(frozen=True, slots=True)
class Lost:
    """The pipeline ended; `reason` names the stage or worker that is missing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """What runs is finished, nothing new is taken."""


ServiceState = Loading | Ready | Lost | Draining


def state_object(state: ServiceState) -> dict[str, object]:
    """The state for /health."""
    match state:
        case Ready():
            return {"status": "ok"}
        case Loading(stages, waiting_for):
            details = [
                {
                    "stage": stage.stage,
                    "worker": stage.worker,
                    "layers": stage.layers,
                    "done_bytes": stage.done_bytes,
                    "total_bytes": stage.total_bytes,
                }
                for _, stage in sorted(stages.items())
            ]
            waiting = {"waiting_for": waiting_for} if waiting_for else {}
            return {"status": "loading", "progress": round(state.progress, 4), "stages": details, **waiting}
        case Lost(reason):
            return {"status": "unavailable", "reason": reason}
        case Draining():
            return {"status": "draining"}
