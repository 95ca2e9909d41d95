"""What a worker prints at start."""

from lamina.rpc_worker.describe import device_table
from lamina.spec.device import DeviceProfile
from lamina.spec.ids import DeviceId, WorkerName


def test_the_devices_fit_80_columns() -> None:
    """Nothing is cut, however long a card's name is."""
    name = "NVIDIA GeForce RTX 4080 Laptop GPU in a box whose name goes on for longer than a line"
    profiles = [
        DeviceProfile(
            DeviceId(WorkerName("w"), index), "cuda", name, 16 << 30, 12 << 30, "cuBLAS", "bf16", ("f16",), True, 4, {}
        )
        for index in range(2)
    ]
    text = device_table(profiles)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).count(name) == 2
    for part in ("0: cuda", "1: cuda", "12.0 of 16.0 GiB free", "cuBLAS, 4 threads", "bf16, graphs on"):
        assert part in text
