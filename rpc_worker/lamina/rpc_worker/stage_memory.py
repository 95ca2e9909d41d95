"""What a stage takes of its device beside the cache, before anything is read: refused with numbers if it cannot fit."""

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import ExpertLimits, StepLimits
from lamina.spec.checkpoint import TensorIndex
from lamina.spec.errors import CapacityExceeded
from lamina.spec.memory import arena_layout, stage_weight_bytes_on
from lamina.spec.model import ExpertsFfn, LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from lamina.spec.quant import WEIGHT_TYPES


def step_limits(settings: StageSettings, spec: ModelSpec, layers: LayerRange) -> StepLimits:
    """The largest step of these layers that these settings allow."""
    sizes = [
        (layer.ffn.num_experts, layer.ffn.num_selected, spec.hidden, layer.ffn.intermediate)
        for layer in spec.layers_of(layers)
        if isinstance(layer.ffn, ExpertsFfn)
    ]
    experts = ExpertLimits(*map(max, zip(*sizes, strict=True))) if sizes else None
    rows = (settings.max_rows, settings.max_seqs, settings.max_logit_rows)
    return StepLimits(*rows, settings.max_blocks_per_seq, experts)


def check_fits(
    backend: Backend, spec: ModelSpec, layers: LayerRange, settings: StageSettings, tensors: TensorIndex
) -> None:
    """Raise CapacityExceeded unless weights, arena and workspace fit into what the device has free now (B-42, C-04)."""
    bits = {kind: backend.weight_bits(kind) for kind in WEIGHT_TYPES}
    weights = stage_weight_bytes_on(spec, layers, tensors, bits)
    arena = sum(item.num_bytes for item in arena_layout(spec, layers, settings))
    arena += backend.workspace_bytes(step_limits(settings, spec, layers), *widest(spec, layers))
    free = backend.device_facts().free_bytes
    if weights + arena > free:
        mib = 2**20
        raise CapacityExceeded(
            f"layers {layers} need {(weights + arena) / mib:.1f} MiB (weights {weights / mib:.1f}, arena"
            f" {arena / mib:.1f}), {free / mib:.1f} MiB are free; give this worker fewer layers or more memory"
        )


def widest(spec: ModelSpec, layers: LayerRange) -> tuple[int, int]:
    """in_features and out_features of the largest matrices; of one expert where there are several."""
    widths_in, widths_out = [spec.hidden], [spec.hidden]
    for layer in spec.layers_of(layers):
        attention, intermediate = layer.attention, layer.ffn.intermediate
        widths_in += [attention.output_width, intermediate]
        widths_out += [attention.query_width + attention.key_width + attention.value_width, 2 * intermediate]
        if isinstance(layer.ffn, ExpertsFfn):
            widths_out.append(layer.ffn.num_experts)
    if layers.start == 0 or layers.stop == spec.num_layers:
        widths_out.append(spec.vocab_size)
    return max(widths_in), max(widths_out)
