"""What `coordinator serve` is asked for beside the session, checked."""

from dataclasses import dataclass

from lamina.coordinator.api.settings import ApiSettings
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Raises InvalidConfig for listening beyond loopback without a key or --insecure."""

    listen: Address
    api: ApiSettings
    insecure: bool
    model_name: str
    join_listen: Address
    num_workers: int  # that must have joined before the model is split over them
    max_connections: int
    drain_s: float
    recover_s: float  # that open requests wait when a worker is lost
    replan_after_s: float  # that the model waits for it, before it is split over the workers that are left

    def __post_init__(self) -> None:
        if not self.listen.is_loopback and not self.api.api_key and not self.insecure:
            raise InvalidConfig(
                f"--host {self.listen.host} lets others in without a key: give --api-key, or say --insecure"
            )
        if not self.join_listen.is_loopback and not self.insecure:
            raise InvalidConfig(f"--join-listen {self.join_listen} takes workers unencrypted: say --insecure")
