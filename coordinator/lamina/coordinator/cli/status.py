"""`coordinator status` and `devices`: what a running server knows of its cluster, as tables or JSON."""

import json
from typing import Any

from rich.console import Console

from lamina.coordinator.cli.client import ServerClient
from lamina.coordinator.cli.progress import IDLE_REMEDY, compact_table, plain_console

_MIB = 2**20


def show_status(client: ServerClient, *, as_json: bool) -> None:
    """The state, the stages, the load."""
    cluster = client.get("/admin/cluster")
    if as_json:
        print(json.dumps(cluster, indent=2))
        return
    console = plain_console()
    console.print(_state_line(cluster), soft_wrap=True)
    console.print(_load_line(cluster))
    if cluster["stages"]:
        _print_stages(console, cluster)
    for worker in cluster["idle_workers"]:
        line = f"idle: worker {worker['name']} at {worker['address']} holds no layers; {IDLE_REMEDY}"
        console.print(line, soft_wrap=True)
    for address in cluster["absent_workers"]:
        console.print(f"absent: the worker at {address} does not answer; the split does without it")
    for stage in cluster["state"].get("stages", ()):
        share = stage["done_bytes"] / stage["total_bytes"] if stage["total_bytes"] else 0.0
        console.print(f"loading stage {stage['stage']} on {stage['worker']}: {100 * share:.0f} %")


def show_devices(client: ServerClient, *, as_json: bool) -> None:
    """The devices of all workers."""
    workers = client.get("/admin/cluster")["workers"]
    if as_json:
        print(json.dumps(workers, indent=2))
        return
    console = plain_console()
    for worker in workers:
        state = "up" if worker["up"] else "down"
        console.print(f"{worker['name']} at {worker['address']}: {state}", soft_wrap=True)
        for device in worker["devices"]:
            for line in _device_lines(device):
                console.print(f"  {line}", soft_wrap=True)


def _device_lines(device: dict[str, Any]) -> list[str]:
    free, total = (device[key] / _MIB for key in ("free_bytes", "total_bytes"))
    threads = f", {device['threads']} thread(s)" if device["threads"] else ""
    lines = [
        f"{device['index']}: {device['kind']}, {device['name']}",
        f"   {free:.0f} of {total:.0f} MiB free, kernels {device['kernel']}{threads}",
    ]
    return [*lines, f"   {_card(device['health'])}"] if device["health"] else lines


def _card(health: dict[str, float]) -> str:
    """Temperature, power, clock, and the PCIe link as it is, with what it could be where that is more."""
    state = f"{health['temperature_c']:.0f} °C, {health['power_w']:.0f} W, {health['clock_mhz']:.0f} MHz"
    if not health["pcie_generation"]:
        return state
    now = f"PCIe {health['pcie_generation']:.0f} x{health['pcie_width']:.0f}"
    could_be = f"{health['max_pcie_generation']:.0f} x{health['max_pcie_width']:.0f}"
    return f"{state}, {now if now == f'PCIe {could_be}' else f'{now} of {could_be}'}"


def _graphs(graphs: dict[str, Any]) -> str:
    """Share of steps that were replays, and why others were not."""
    num_vetoed = sum(graphs["vetoes"].values())
    total = graphs["replays"] + num_vetoed
    if not total:
        return "-"
    share = f"{100 * graphs['replays'] / total:.0f} %"
    return f"{share} ({', '.join(graphs['vetoes'])})" if num_vetoed else share


def _state_line(cluster: dict[str, Any]) -> str:
    state = cluster["state"]
    more = state.get("reason") or state.get("waiting_for") or ""
    return f"{cluster['model']}: {state['status']}{f' ({more})' if more else ''}"


def _load_line(cluster: dict[str, Any]) -> str:
    status, num_open = cluster["state"]["status"], cluster["num_requests_open"]
    if status != "ok":
        fate = "are finished first" if status == "draining" else "wait for the model"
        return f"{cluster['tokens_per_s']:.1f} tokens/s, {num_open} open request(s){f' {fate}' if num_open else ''}"
    return (
        f"{cluster['tokens_per_s']:.1f} tokens/s, {cluster['num_requests_running']} running,"
        f" {cluster['num_requests_waiting']} waiting, KV cache {100 * cluster['kv_cache_usage_ratio']:.1f} % in use"
    )


def _print_stages(console: Console, cluster: dict[str, Any]) -> None:
    """A row for each; what all of them share stands in a line above."""
    rtts = {link["from_stage"]: link["rtt_s"] for link in cluster["links"]}
    is_up = {worker["name"]: worker["up"] for worker in cluster["workers"]}
    rows = [
        _stage_cells(stage, is_up.get(stage["worker"], False), rtts.get(stage["stage"])) for stage in cluster["stages"]
    ]
    shared = [name for name in ("dtype", "graphs", "edge") if len({row[name] for row in rows}) == 1]
    if shared:
        line = ", ".join(f"{name} {rows[0][name]}" for name in shared)
        console.print(f"all stages: {line}", soft_wrap=True)
    headers = [name for name in rows[0] if name not in shared]
    table = compact_table(*headers, num_texts=headers.index("MiB"))
    for row in rows:
        table.add_row(*(row[name] for name in headers))
    console.print(table)


def _stage_cells(stage: dict[str, Any], is_up: bool, rtt_s: float | None) -> dict[str, str]:
    """By header, texts before numbers."""
    num_bytes = stage["weight_bytes"] + stage["cache_bytes"] + stage["arena_bytes"]
    return {
        "stage": str(stage["stage"]),
        "device": stage["device"],
        "up": "yes" if is_up else "no",
        "layers": f"{stage['first_layer']}-{stage['first_layer'] + stage['num_layers'] - 1}",
        "dtype": stage["compute_dtype"],
        "graphs": _graphs(stage["graphs"]),
        "edge": stage["link_kind"] or "-",
        "MiB": f"{num_bytes / _MIB:.1f}",
        "steps/s": f"{stage['steps_per_s']:.1f}",
        "busy %": f"{100 * stage['busy_ratio']:.0f}",
        "hop ms": "-" if rtt_s is None else f"{1000 * rtt_s:.2f}",
    }
