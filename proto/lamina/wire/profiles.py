"""Versions, devices, stages and settings <-> messages."""

from dataclasses import asdict

from lamina.spec.device import DeviceHealth, DeviceProfile, GraphCounts, LoadedStage, Version, WorkerProfile
from lamina.spec.errors import InvalidConfig
from lamina.spec.ids import DeviceId, Epoch, PlacementId, WorkerName
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.quant import GgmlType
from lamina.v1 import step_pb2 as pb
from lamina.v1 import worker_pb2 as wpb

_WIRE_CODES = {"f32": pb.FRAME_DTYPE_F32, "bf16": pb.FRAME_DTYPE_BF16, "f16": pb.FRAME_DTYPE_F16}
_WIRE_NAMES = {code: name for name, code in _WIRE_CODES.items()}


def version_to_message(version: Version) -> wpb.Version:
    """Field for field."""
    return wpb.Version(
        product=version.product,
        protocol_major=version.protocol_major,
        protocol_minor=version.protocol_minor,
        schema_digest=version.schema_digest,
    )


def version_from_message(message: wpb.Version) -> Version:
    """Field for field."""
    return Version(message.product, message.protocol_major, message.protocol_minor, message.schema_digest)


def _health_to_message(health: DeviceHealth) -> wpb.DeviceHealth:
    return wpb.DeviceHealth(**asdict(health))


def _health_from_message(message: wpb.DeviceHealth) -> DeviceHealth:
    return DeviceHealth(
        pcie_generation=message.pcie_generation,
        pcie_width=message.pcie_width,
        max_pcie_generation=message.max_pcie_generation,
        max_pcie_width=message.max_pcie_width,
        temperature_c=message.temperature_c,
        power_w=message.power_w,
        clock_mhz=message.clock_mhz,
        memory_clock_mhz=message.memory_clock_mhz,
        busy_ratio=message.busy_ratio,
    )


def graphs_to_message(counts: GraphCounts) -> wpb.GraphCounts:
    """Field for field."""
    return wpb.GraphCounts(**asdict(counts))


def _graphs_from_message(message: wpb.GraphCounts) -> GraphCounts:
    return GraphCounts(
        captures=message.captures,
        replays=message.replays,
        evictions=message.evictions,
        held=message.held,
        held_bytes=message.held_bytes,
        vetoes=dict(message.vetoes),
    )


def device_to_message(profile: DeviceProfile) -> wpb.Device:
    """Field for field; the worker's name travels beside it."""
    return wpb.Device(
        index=profile.id.index,
        kind=profile.kind,
        name=profile.name,
        total_bytes=profile.total_bytes,
        free_bytes=profile.free_bytes,
        kernel=profile.kernel,
        compute_dtype=profile.compute_dtype,
        kv_dtypes=profile.kv_dtypes,
        graphs=profile.graphs,
        threads=profile.threads,
        weight_bits={int(kind): bits for kind, bits in profile.weight_bits.items()},
        health=None if profile.health is None else _health_to_message(profile.health),
    )


def _device_from_message(message: wpb.Device, worker: WorkerName) -> DeviceProfile:
    known = {int(kind) for kind in GgmlType}
    return DeviceProfile(
        id=DeviceId(worker, message.index),
        kind=message.kind,
        name=message.name,
        total_bytes=message.total_bytes,
        free_bytes=message.free_bytes,
        kernel=message.kernel,
        compute_dtype=message.compute_dtype,
        kv_dtypes=tuple(message.kv_dtypes),
        graphs=message.graphs,
        threads=message.threads,
        weight_bits={GgmlType(kind): bits for kind, bits in message.weight_bits.items() if kind in known},
        health=_health_from_message(message.health) if message.HasField("health") else None,
    )


def _stage_from_message(message: wpb.LoadedStage) -> LoadedStage:
    return LoadedStage(
        placement=PlacementId(message.placement),
        epoch=Epoch(message.epoch),
        stage=message.stage,
        device=message.device,
        layers=LayerRange(message.first_layer, message.first_layer + message.num_layers),
        model_digest=message.model_digest,
        settings_digest=message.settings_digest,
        weight_bytes=message.weight_bytes,
        cache_bytes=message.cache_bytes,
        arena_bytes=message.arena_bytes,
        controlled=message.controlled,
        num_steps=message.num_steps,
        busy_s=message.busy_s,
        num_sequences=message.num_sequences,
        graphs=_graphs_from_message(message.graphs),
        compute_dtype=message.compute_dtype,
        num_prefill_steps=message.num_prefill_steps,
        prefill_busy_s=message.prefill_busy_s,
        link_bytes=message.link_bytes,
        link_queue_depth=message.link_queue_depth,
        link_kind=message.link_kind,
    )


def worker_from_message(message: wpb.DescribeResponse) -> WorkerProfile:
    """A worker's answer to Describe."""
    name = WorkerName(message.worker)
    return WorkerProfile(
        version=version_from_message(message.version),
        name=name,
        advertise=message.advertise,
        devices=tuple(_device_from_message(device, name) for device in message.devices),
        stages=tuple(_stage_from_message(stage) for stage in message.stages),
        uptime_s=message.uptime_s,
    )


def settings_to_message(settings: StageSettings) -> wpb.StageSettings:
    """Field for field."""
    return wpb.StageSettings(
        block_tokens=settings.block_tokens,
        max_rows=settings.max_rows,
        max_seqs=settings.max_seqs,
        max_logit_rows=settings.max_logit_rows,
        max_context=settings.max_context,
        kv_dtype=settings.kv_dtype,
        wire_dtype=_WIRE_CODES[settings.wire_dtype],
        cuda_graphs=settings.cuda_graphs,
    )


def settings_from_message(message: wpb.StageSettings) -> StageSettings:
    """Field for field. Raises InvalidConfig for a value out of range."""
    if message.wire_dtype not in _WIRE_NAMES:
        raise InvalidConfig(f"wire dtype code {message.wire_dtype} is unknown")
    return StageSettings(
        max_rows=message.max_rows,
        max_seqs=message.max_seqs,
        max_logit_rows=message.max_logit_rows,
        max_context=message.max_context,
        kv_dtype=message.kv_dtype,
        wire_dtype=_WIRE_NAMES[message.wire_dtype],
        block_tokens=message.block_tokens,
        cuda_graphs=message.cuda_graphs,
    )
