"""Identities. State is keyed by placement, so two placements (a re-plan, replicas) can live side by side."""

from dataclasses import dataclass
from typing import NewType

SeqId = NewType("SeqId", int)  # never reused: a preempted or re-planned sequence comes back under a new id
StepId = NewType("StepId", int)  # numbers micro-batches within an epoch, ascending from 0
Epoch = NewType("Epoch", int)
BlockId = NewType("BlockId", int)  # logical KV block, the same on every stage
PlacementId = NewType("PlacementId", str)
WorkerName = NewType("WorkerName", str)


@dataclass(frozen=True, slots=True, order=True)
class DeviceId:
    """One device of one worker: `worker/index`."""

    worker: WorkerName
    index: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.index}"
