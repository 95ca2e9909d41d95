"""Models and devices for the planner's tests: layers of any width, no weights anywhere."""

from collections.abc import Sequence
from pathlib import Path

from lamina.coordinator.planner.memory import Demand
from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.device import DeviceProfile
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.model import (
    Activation,
    AttentionSpec,
    CacheGroup,
    CacheKind,
    DenseFfn,
    LayerSpec,
    ModelSpec,
    RopeLayout,
    RopeSpec,
    stage_tensor_shapes,
)
from lamina.spec.placement import StageSettings
from lamina.spec.quant import WEIGHT_TYPES, GgmlType, row_bytes

SETTINGS = StageSettings(max_rows=8, max_seqs=2, max_logit_rows=2, max_context=64)


def demand_of(
    num_layers: int,
    widths: Sequence[int],
    *,
    hidden: int = 32,
    vocab: int = 100,
    tied: bool = False,
    num_tokens: int = 128,
    settings: StageSettings = SETTINGS,
) -> Demand:
    """A llama whose layer i has an FFN of widths[i], stored as F16 matrices and F32 norms."""
    attention = AttentionSpec(4, 2, hidden // 4, hidden // 4, 1.0, RopeSpec(RopeLayout.NORM, hidden // 4, 1e4))
    layers = tuple(
        LayerSpec(index, attention, DenseFfn(widths[index], Activation.SILU), 0) for index in range(num_layers)
    )
    spec = ModelSpec(
        architecture="llama",
        name="planned",
        digest="d",
        layers=layers,
        vocab_size=vocab,
        hidden=hidden,
        context_length=4096,
        norm_eps=1e-5,
        tie_embeddings=tied,
        embedding_scale=1.0,
        final_softcap=None,
        cache_groups=(CacheGroup(0, CacheKind.FULL),),
    )
    tensors = []
    for name, shape in stage_tensor_shapes(spec, spec.all_layers).items():
        kind = GgmlType.F32 if len(shape) == 1 else GgmlType.F16
        rows = 1 if len(shape) == 1 else shape[1]
        tensors.append(TensorInfo(name, kind, shape, Path("m.gguf"), 0, rows * row_bytes(kind, shape[0])))
    return Demand(spec, TensorIndex(tensors), settings, num_tokens)


def device(number: int, free_bytes: int, bits: float) -> DeviceProfile:
    """Device 0 of worker w<number>, whose matrices take `bits` per value."""
    return DeviceProfile(
        id=DeviceId(WorkerName(f"w{number}"), 0),
        kind="cpu",
        name="tested",
        total_bytes=free_bytes,
        free_bytes=free_bytes,
        kernel="",
        compute_dtype="f32",
        kv_dtypes=("f16",),
        graphs=False,
        threads=1,
        weight_bits=dict.fromkeys(WEIGHT_TYPES, bits),
    )
