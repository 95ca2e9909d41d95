"""What a worker says of its devices and stages: for `Describe` and for the table at start."""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lamina.kernels.backend import Backend, DeviceFacts
from lamina.rpc_worker.stage_runtime import StageRuntime
from lamina.spec.device import DeviceHealth, DeviceProfile
from lamina.spec.ids import DeviceId
from lamina.spec.quant import WEIGHT_TYPES
from lamina.v1 import worker_pb2 as wpb
from lamina.wire.profiles import graphs_to_message


def device_profile(
    id_: DeviceId,
    backend: Backend,
    facts: DeviceFacts,
    reclaimable_bytes: int = 0,
    health: DeviceHealth | None = None,
) -> DeviceProfile:
    """The device, with the memory that `facts` found, and what the next load may evict counted as free."""
    can = backend.capabilities
    return DeviceProfile(
        id=id_,
        kind=facts.kind,
        name=facts.name,
        total_bytes=facts.total_bytes,
        free_bytes=min(facts.free_bytes + reclaimable_bytes, facts.total_bytes),
        kernel=can.kernel or backend.name,
        compute_dtype=can.compute_dtype,
        kv_dtypes=tuple(sorted(dtype.value for dtype in can.kv_dtypes)),
        graphs=can.graphs,
        threads=can.num_threads,
        weight_bits={kind: backend.weight_bits(kind) for kind in sorted(WEIGHT_TYPES)},
        health=health,
    )


def stage_message(runtime: StageRuntime, device: int) -> wpb.LoadedStage:
    """A loaded stage, for Describe."""
    key, facts, link = runtime.key, runtime.stage.facts, runtime.link
    return wpb.LoadedStage(
        placement=key.placement,
        epoch=key.epoch,
        stage=key.index,
        device=device,
        first_layer=runtime.layers.start,
        num_layers=len(runtime.layers),
        model_digest=runtime.spec.digest,
        settings_digest=runtime.settings.digest(),
        weight_bytes=facts.weight_bytes,
        cache_bytes=facts.cache_bytes,
        arena_bytes=facts.arena_bytes,
        controlled=runtime.is_controlled,
        num_steps=facts.num_steps,
        busy_s=facts.busy_s,
        num_sequences=facts.num_sequences,
        graphs=graphs_to_message(facts.graphs),
        compute_dtype=facts.compute_dtype,
        num_prefill_steps=facts.num_prefill_steps,
        prefill_busy_s=facts.prefill_busy_s,
        link_bytes=0 if link is None else link.num_bytes,
        link_queue_depth=0 if link is None else link.queue_depth,
        link_kind="" if link is None else link.kind,
    )


def device_table(profiles: Sequence[DeviceProfile], served_by: Sequence[str]) -> str:
    """What is printed at start: a few lines per device, which fit a terminal of 80 columns whatever its name.

    `served_by` says of each by what in place of something faster, and why; empty where there is nothing faster.
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    for profile, instead in zip(profiles, served_by, strict=True):
        free, total = (size / 2**30 for size in (profile.free_bytes, profile.total_bytes))
        table.add_row(f"{profile.id.index}: {profile.kind}", "name", profile.name)
        table.add_row("", "memory", f"{free:.1f} of {total:.1f} GiB free")
        threads = f", {profile.threads} thread{'s' * (profile.threads > 1)}" if profile.threads else ""
        table.add_row("", "kernels", f"{profile.kernel}{threads}")
        if instead:
            table.add_row("", "served by", Text(instead))
        table.add_row("", "compute", f"{profile.compute_dtype}, graphs {'on' if profile.graphs else 'off'}")
        table.add_row("", "KV cache", " ".join(profile.kv_dtypes))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(table)
    output = console.file
    text = output.getvalue() if isinstance(output, io.StringIO) else ""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
