"""Who of some workers answers now. Dials, describes, hangs up; keeps nothing."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.coordinator.cluster.client import WorkerClient
from lamina.spec.address import Address
from lamina.spec.device import WorkerProfile
from lamina.spec.errors import LaminaError

LOOK_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class Attendance:
    """Those that answer, and why each of the others cannot be used; in the order asked."""

    present: Mapping[Address, WorkerProfile]
    absent: Mapping[Address, LaminaError]


async def call_roll(addresses: Sequence[Address]) -> Attendance:
    """Dial all at once, within LOOK_DEADLINE_S."""
    answers = await asyncio.gather(*map(_find, addresses))
    present: dict[Address, WorkerProfile] = {}
    absent: dict[Address, LaminaError] = {}
    for address, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, WorkerProfile):
            present[address] = answer
        else:
            absent[address] = answer
    return Attendance(present, absent)


async def _find(address: Address) -> WorkerProfile | LaminaError:
    try:
        client = await WorkerClient.dial(address, deadline_s=LOOK_DEADLINE_S)
    except LaminaError as error:
        return error
    await client.close()
    return client.profile
