"""What cards and recorded steps look like in /metrics and in the tables of `coordinator status` and `devices`."""

from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lamina.coordinator.cli.client import ServerClient
from lamina.coordinator.cli.status import show_devices, show_status
from lamina.coordinator.telemetry.device_metrics import graph_metrics, graphs_object, health_metrics, health_object
from lamina.spec.device import DeviceHealth, DeviceProfile, GraphCounts, Version, WorkerProfile
from lamina.spec.ids import DeviceId, WorkerName

HEALTH = DeviceHealth(3, 4, 4, 16, 61.5, 118.25, 1800, 5005, 0.75)
COUNTS = GraphCounts(3, 970, 1, 2, 7 << 20, {"not faster": 10, "step too large": 20})


def _profile(*healths: DeviceHealth | None) -> WorkerProfile:
    devices = tuple(
        DeviceProfile(
            DeviceId(WorkerName("a"), index), "cuda", "card", 8 << 30, 6 << 30, "dp4a", "f32", (), True, 0, {}, health
        )
        for index, health in enumerate(healths)
    )
    return WorkerProfile(Version("1", 1, 0, b""), WorkerName("a"), "", devices, (), 1.0)


def _scraped(metrics: Any) -> dict[str, float]:
    class Source:
        def collect(self) -> Any:
            return metrics

    registry = CollectorRegistry()
    registry.register(Source())
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_what_a_card_measures_is_scraped_and_nothing_is_made_up() -> None:
    """C-05: link, temperature, power and clocks by worker and device; a device that measures nothing has no sample."""
    found = _scraped(health_metrics({"a": _profile(None, HEALTH)}))
    where = '{device="1",worker="a"}'
    assert found == {
        f"lamina_device_temperature_celsius{where}": 61.5,
        f"lamina_device_power_watts{where}": 118.25,
        f"lamina_device_clock_mhz{where}": 1800,
        f"lamina_device_memory_clock_mhz{where}": 5005,
        f"lamina_device_busy_ratio{where}": 0.75,
        f"lamina_device_pcie_generation{where}": 3,
        f"lamina_device_pcie_width{where}": 4,
    }


def test_recorded_steps_are_scraped() -> None:
    """C-15: captures, replays, evictions, bytes; vetoes by reason."""
    found = _scraped(graph_metrics([("a", 0, COUNTS), ("b", 1, GraphCounts())]))
    a = 'stage="0",worker="a"'
    assert {name: value for name, value in found.items() if a in name} == {
        f"lamina_graph_captures_total{{{a}}}": 3,
        f"lamina_graph_replays_total{{{a}}}": 970,
        f"lamina_graph_evictions_total{{{a}}}": 1,
        f"lamina_graph_held{{{a}}}": 2,
        f"lamina_graph_bytes{{{a}}}": 7 << 20,
        f'lamina_graph_vetoes_total{{reason="not faster",{a}}}': 10,
        f'lamina_graph_vetoes_total{{reason="step too large",{a}}}': 20,
    }
    assert found['lamina_graph_replays_total{stage="1",worker="b"}'] == 0


def test_reasons_that_we_do_not_know_are_one_label() -> None:
    """C-15: a worker of another version must not make a time series of every string."""
    counts = GraphCounts(vetoes={"not faster": 3, **{f"because of {i}": 2 for i in range(50)}})
    found = _scraped(graph_metrics([("a", 0, counts)]))
    vetoes = {name: value for name, value in found.items() if "vetoes" in name}
    where = 'stage="0",worker="a"'
    assert vetoes == {
        f'lamina_graph_vetoes_total{{reason="not faster",{where}}}': 3,
        f'lamina_graph_vetoes_total{{reason="other",{where}}}': 100,
    }


class _Server:
    """Answers /admin/cluster."""

    def __init__(self, cluster: dict[str, Any]) -> None:
        self._cluster = cluster

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/admin/cluster"
        return self._cluster


def _device(health: DeviceHealth | None) -> dict[str, Any]:
    sizes = {"free_bytes": 6 << 30, "total_bytes": 8 << 30}
    return {"index": 0, "kind": "cuda", "name": "card", "kernel": "dp4a", "threads": 0, **sizes} | {
        "health": health_object(health)
    }


@pytest.mark.parametrize(
    ("health", "said"),
    [
        (None, ("a at h:1: up", "0: cuda, card", "6144 of 8192 MiB free, kernels dp4a")),
        (HEALTH, ("62 °C, 118 W, 1800 MHz, PCIe 3 x4 of 4 x16",)),
        (DeviceHealth(4, 16, 4, 16, 40.0, 30.0, 210, 405, 0.0), ("40 °C, 30 W, 210 MHz, PCIe 4 x16",)),
        (DeviceHealth(temperature_c=40.0), ("40 °C, 0 W, 0 MHz",)),
    ],
)
def test_the_table_of_devices(
    capsys: pytest.CaptureFixture[str], health: DeviceHealth | None, said: tuple[str, ...]
) -> None:
    """Where the link could be faster than it is, both are shown."""
    worker = {"name": "a", "address": "h:1", "up": True, "devices": [_device(health)]}
    show_devices(cast(ServerClient, _Server({"workers": [worker]})), as_json=False)
    told = capsys.readouterr().out
    assert all(part in told for part in said), told
    assert all(len(line) <= 80 for line in told.splitlines())


STAGE = {
    "stage": 0,
    "worker": "a",
    "device": "a/0",
    "first_layer": 0,
    "num_layers": 4,
    "weight_bytes": 1 << 20,
    "cache_bytes": 0,
    "arena_bytes": 0,
    "steps_per_s": 1.0,
    "busy_ratio": 0.5,
    "compute_dtype": "bf16",
    "graphs": graphs_object(COUNTS),
    "link_kind": "direct",
}
CLUSTER: dict[str, Any] = {
    "model": "m",
    "state": {"status": "ok"},
    "tokens_per_s": 0.0,
    "num_requests_open": 0,
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "kv_cache_usage_ratio": 0.0,
    "workers": [{"name": "a", "up": True}],
    "idle_workers": [],
    "absent_workers": [],
    "links": [],
    "stages": [STAGE],
}


def test_the_table_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """The dtype in force, the share of replays, and the reasons of the other steps."""
    show_status(cast(ServerClient, _Server(CLUSTER)), as_json=False)
    told = " ".join(capsys.readouterr().out.split())
    assert "all stages: dtype bf16, graphs 97 % (" in told
    assert ", edge direct" in told
    for part in ("97 %", "not faster", "step too large"):
        assert all(word in told for word in part.split())


def test_the_table_names_an_edge_that_is_not_direct(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{**STAGE, "stage": index, "link_kind": kind} for index, kind in enumerate(("direct", "grpc", ""))]
    show_status(cast(ServerClient, _Server(CLUSTER | {"stages": stages})), as_json=False)
    *_, header, first, second, third = (line.split() for line in capsys.readouterr().out.splitlines())
    column = header.index("edge")
    assert [row[column] for row in (first, second, third)] == ["direct", "grpc", "-"]


def test_the_table_of_unequal_stages_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """What differs is a column; a worker with a common name and a GPU's gigabytes leave every number whole."""
    stages = [
        {**STAGE, "stage": index, "device": f"machine-a/{index}", "weight_bytes": 70 << 30, "compute_dtype": dtype}
        | {"graphs": graphs_object(GraphCounts(replays=index))}
        for index, dtype in enumerate(("bf16", "f32"))
    ]
    links = [{"from_stage": 0, "rtt_s": 0.01234}]
    show_status(cast(ServerClient, _Server(CLUSTER | {"stages": stages, "links": links})), as_json=False)
    *_, header, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert " ".join(header.split()) == "stage device up layers dtype graphs MiB steps/s busy % hop ms"
    assert " ".join(first.split()) == "0 machine-a/0 yes 0-3 bf16 - 71680.0 1.0 50 12.34"
    assert " ".join(second.split()) == "1 machine-a/1 yes 0-3 f32 100 % 71680.0 1.0 50 -"
    assert max(map(len, (header, first, second))) <= 80


@pytest.mark.parametrize(
    ("state", "num_open", "said"),
    [
        ({"status": "ok"}, 3, "0.0 tokens/s, 2 running, 1 waiting, KV cache 0.0 % in use"),
        ({"status": "unavailable", "reason": "w1 is gone"}, 3, "0.0 tokens/s, 3 open request(s) wait for the model"),
        ({"status": "unavailable", "reason": "w1 is gone"}, 0, "0.0 tokens/s, 0 open request(s)"),
        ({"status": "draining"}, 2, "0.0 tokens/s, 2 open request(s) are finished first"),
    ],
)
def test_what_becomes_of_open_requests(
    capsys: pytest.CaptureFixture[str], state: dict[str, str], num_open: int, said: str
) -> None:
    """Without a model nothing runs, and yet somebody waits."""
    load = {"num_requests_open": num_open, "num_requests_running": 2, "num_requests_waiting": 1}
    show_status(cast(ServerClient, _Server(CLUSTER | load | {"state": state})), as_json=False)
    assert capsys.readouterr().out.splitlines()[1] == said


def test_a_worker_that_idles_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    idle = {"idle_workers": [{"name": "b", "address": "h:2"}]}
    show_status(cast(ServerClient, _Server(CLUSTER | idle)), as_json=False)
    told = capsys.readouterr().out
    assert "idle: worker b at h:2 holds no layers; the split works without it; restart `coordinator serve`" in told


def test_what_looks_like_markup_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Addresses of IPv6 and names of files: neither a style, nor the end of one, nor a picture."""
    state = {"status": "unavailable", "reason": "[/srv/b] is gone :ab:"}
    absent = {"absent_workers": ["[fd00:ab::1]:50051"], "model": "m[x]", "state": state}
    show_status(cast(ServerClient, _Server(CLUSTER | absent)), as_json=False)
    told = capsys.readouterr().out
    assert "m[x]: unavailable ([/srv/b] is gone :ab:)" in told
    assert "absent: the worker at [fd00:ab::1]:50051 does not answer" in told
