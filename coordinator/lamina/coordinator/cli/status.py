"""`coordinator status` and `devices`: what a running server knows of its cluster, as tables or JSON."""

import json
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from lamina.coordinator.cli.client import ServerClient

_MIB = 2**20
_WIDTH = 120


def show_status(client: ServerClient, *, as_json: bool) -> None:
    """The state, the stages, the load."""
    cluster = client.get("/admin/cluster")
    if as_json:
        print(json.dumps(cluster, indent=2))
        return
    console = Console(width=_WIDTH)
    console.print(_state_line(cluster), highlight=False)
    console.print(_load_line(cluster), highlight=False)
    if cluster["stages"]:
        console.print(_stage_table(cluster))
    for worker in cluster["idle_workers"]:
        console.print(f"idle: worker {worker['name']} at {worker['address']} holds no layers", highlight=False)
    for stage in cluster["state"].get("stages", ()):
        share = stage["done_bytes"] / stage["total_bytes"] if stage["total_bytes"] else 0.0
        console.print(f"loading stage {stage['stage']} on {stage['worker']}: {100 * share:.0f} %", highlight=False)


def show_devices(client: ServerClient, *, as_json: bool) -> None:
    """The devices of all workers."""
    workers = client.get("/admin/cluster")["workers"]
    if as_json:
        print(json.dumps(workers, indent=2))
        return
    table = Table("worker", Column("address", no_wrap=True), "up", "device", "name", "free", "total", "kernels")
    table.add_column("card or threads")
    for worker in workers:
        for device in worker["devices"]:
            table.add_row(
                worker["name"],
                worker["address"],
                "yes" if worker["up"] else "no",
                f"{device['index']}: {device['kind']}",
                device["name"],
                f"{device['free_bytes'] / _MIB:.0f} MiB",
                f"{device['total_bytes'] / _MIB:.0f} MiB",
                device["kernel"],
                _card(device["health"]) if device["health"] else str(device["threads"] or "-"),
            )
    Console(width=_WIDTH).print(table)


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
    share = f"{100 * graphs['replays'] / total:.0f} % of steps"
    return f"{share} ({', '.join(graphs['vetoes'])})" if num_vetoed else share


def _state_line(cluster: dict[str, Any]) -> str:
    state = cluster["state"]
    more = state.get("reason") or state.get("waiting_for") or ""
    return f"{cluster['model']}: {state['status']}{f' ({more})' if more else ''}"


def _load_line(cluster: dict[str, Any]) -> str:
    return (
        f"{cluster['tokens_per_s']:.1f} tokens/s, {cluster['num_requests_running']} running,"
        f" {cluster['num_requests_waiting']} waiting, KV cache {100 * cluster['kv_cache_usage_ratio']:.1f} % in use"
    )


def _stage_table(cluster: dict[str, Any]) -> Table:
    rtts = {link["from_stage"]: link["rtt_s"] for link in cluster["links"]}
    is_up = {worker["name"]: worker["up"] for worker in cluster["workers"]}
    table = Table("stage", "device", "up", "layers", "memory", "computes in", "steps/s", "busy", "graphs", "next hop")
    for stage in cluster["stages"]:
        num_bytes = stage["weight_bytes"] + stage["cache_bytes"] + stage["arena_bytes"]
        last = stage["first_layer"] + stage["num_layers"] - 1
        rtt_s = rtts.get(stage["stage"])
        table.add_row(
            str(stage["stage"]),
            stage["device"],
            "yes" if is_up.get(stage["worker"]) else "no",
            f"{stage['first_layer']}-{last}",
            f"{num_bytes / _MIB:.1f} MiB",
            stage["compute_dtype"],
            f"{stage['steps_per_s']:.1f}",
            f"{100 * stage['busy_ratio']:.0f} %",
            _graphs(stage["graphs"]),
            "-" if rtt_s is None else f"{1000 * rtt_s:.2f} ms",
        )
    return table
