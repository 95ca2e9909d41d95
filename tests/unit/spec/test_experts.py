"""Mixtures of experts: metadata and tensors -> ExpertsFfn, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.coordinator.planner.memory import Demand, StageCosts
from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.families import model_spec
from lamina.spec.gguf import GgufFile, MetadataValue
from lamina.spec.memory import WeightBytes, arena_layout, kv_block_bytes
from lamina.spec.model import (
    Activation,
    AttentionSpec,
    CacheGroup,
    CacheKind,
    DenseFfn,
    ExpertsFfn,
    Gating,
    LayerRange,
    LayerSpec,
    ModelSpec,
    RopeLayout,
    RopeSpec,
    YarnScaling,
    stage_tensor_shapes,
)
from lamina.spec.placement import StageSettings
from lamina.spec.quant import GgmlType, row_bytes

PATH = Path("toy.gguf")
HIDDEN, FF, EXPERTS, VOCAB, HEADS, KV_HEADS, DIM = 64, 32, 8, 50, 4, 2, 16


def expert_tensors(blk: str, kind: str = "weight") -> dict[str, tuple[int, ...]]:
    """Of one layer: the router's and the experts' matrices, or their biases."""
    if kind == "bias":
        return {
            f"{blk}.ffn_gate_inp.bias": (EXPERTS,), f"{blk}.ffn_gate_exps.bias": (FF, EXPERTS),
            f"{blk}.ffn_up_exps.bias": (FF, EXPERTS), f"{blk}.ffn_down_exps.bias": (HIDDEN, EXPERTS),
        }  # fmt: skip
    return {
        f"{blk}.ffn_gate_inp.weight": (HIDDEN, EXPERTS), f"{blk}.ffn_gate_exps.weight": (HIDDEN, FF, EXPERTS),
        f"{blk}.ffn_up_exps.weight": (HIDDEN, FF, EXPERTS), f"{blk}.ffn_down_exps.weight": (FF, HIDDEN, EXPERTS),
    }  # fmt: skip


def make_file(
    arch: str,
    metadata: Mapping[str, MetadataValue] | None = None,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    without: tuple[str, ...] = (),
    types: Mapping[str, GgmlType] | None = None,
) -> GgufFile:
    """Two layers with experts. `types` gives tensors whose name contains a key another type than F32."""
    keys: dict[str, MetadataValue] = {
        "block_count": 2, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": 96,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6, "expert_count": EXPERTS, "expert_used_count": 3,
        "expert_feed_forward_length": FF,
    }  # fmt: skip
    values = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (HIDDEN, VOCAB), "output_norm.weight": (HIDDEN,)}
    for blk in ("blk.0", "blk.1"):
        shapes |= {
            f"{blk}.attn_norm.weight": (HIDDEN,), f"{blk}.attn_q.weight": (HIDDEN, HEADS * DIM),
            f"{blk}.attn_k.weight": (HIDDEN, KV_HEADS * DIM), f"{blk}.attn_v.weight": (HIDDEN, KV_HEADS * DIM),
            f"{blk}.attn_output.weight": (HEADS * DIM, HIDDEN),
        }  # fmt: skip
        shapes |= expert_tensors(blk)
        if arch == "gpt-oss":
            shapes |= expert_tensors(blk, "bias") | {f"{blk}.post_attention_norm.weight": (HIDDEN,)}
            shapes |= {f"{blk}.attn_sinks.weight": (HEADS,), f"{blk}.attn_output.bias": (HIDDEN,)}
            widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
            shapes |= {f"{blk}.attn_{name}.bias": (width,) for name, width in widths.items()}
        else:
            shapes[f"{blk}.ffn_norm.weight"] = (HIDDEN,)
        if arch == "qwen3moe":
            shapes |= {f"{blk}.attn_{name}_norm.weight": (DIM,) for name in "qk"}
    shapes.update(tensors or {})

    def type_of(name: str) -> GgmlType:
        return next((kind for part, kind in (types or {}).items() if part in name), GgmlType.F32)

    infos = [
        TensorInfo(name, type_of(name), shape, PATH, 0, 0) for name, shape in shapes.items() if name not in without
    ]
    kept = {key: value for key, value in (values | dict(metadata or {})).items() if key not in without}
    return GgufFile(PATH, 3, kept, TensorIndex(infos), ())


def spec_of(file: GgufFile) -> ModelSpec:
    return model_spec(file, "digest")


def test_qwen3moe() -> None:
    """As qwen3, with experts: softmax over all, shares normalised."""
    spec = spec_of(make_file("qwen3moe"))
    wanted = ExpertsFfn(FF, Activation.SILU, EXPERTS, 3, Gating.SOFTMAX, normalise=True)
    assert [layer.ffn for layer in spec.layers] == [wanted, wanted]
    assert spec.layers[0].attention.qk_norm


def test_mixtral_is_a_llama_with_experts() -> None:
    """Its experts are as wide as feed_forward_length says."""
    wide = {
        name.replace("blk.0", blk): tuple(96 if size == FF else size for size in shape)
        for blk in ("blk.0", "blk.1")
        for name, shape in expert_tensors("blk.0").items()
    }
    ffn = spec_of(make_file("llama", tensors=wide, without=("llama.expert_feed_forward_length",))).layers[1].ffn
    assert ffn == ExpertsFfn(96, Activation.SILU, EXPERTS, 3, Gating.SOFTMAX, normalise=True)


def test_gpt_oss() -> None:
    """Biases everywhere, sinks, a window on even layers, YaRN, softmax of the selected, the ffn norm's other name."""
    scaling = {"type": "yarn", "factor": 32.0, "original_context_length": 4096}
    keys = {f"gpt-oss.rope.scaling.{key}": value for key, value in scaling.items()}
    spec = spec_of(make_file("gpt-oss", {**keys, "gpt-oss.attention.sliding_window": 128}))
    first, second = (layer.attention for layer in spec.layers)
    assert (first.window, second.window) == (128, None)
    assert [group.kind for group in spec.cache_groups] == [CacheKind.WINDOW, CacheKind.FULL]
    assert (first.qkv_bias, first.output_bias, first.sinks, first.qk_norm) == (True, True, True, False)
    assert first.rope.scaling == YarnScaling(32.0, 4096)
    assert spec.layers[0].ffn_norm == "post_attention_norm"
    wanted = ExpertsFfn(FF, Activation.SWIGLU_CLAMPED, EXPERTS, 3, Gating.SOFTMAX_SELECTED, normalise=False, bias=True)
    assert spec.layers[1].ffn == wanted


@pytest.mark.parametrize(
    ("pattern", "windows"), [(1, [None, None]), (2, [128, None]), (3, [128, 128]), ((False, True), [None, 128])]
)
def test_the_pattern_of_windows(pattern: MetadataValue, windows: list[int | None]) -> None:
    """A number is a period whose last layer sees everything, an array has a flag for each layer."""
    key = "gpt-oss.attention.sliding_window"
    spec = spec_of(make_file("gpt-oss", {key: 128, f"{key}_pattern": pattern}))
    assert [layer.attention.window for layer in spec.layers] == windows


def test_what_metadata_and_tensors_say() -> None:
    """Layers without a router are dense; gate and up may be one tensor; rule and scale may be in the metadata."""
    dense = {
        "blk.0.ffn_gate.weight": (HIDDEN, 96),
        "blk.0.ffn_up.weight": (HIDDEN, 96),
        "blk.0.ffn_down.weight": (96, HIDDEN),
    }
    fused = {"blk.1.ffn_gate_up_exps.weight": (HIDDEN, 2 * FF, EXPERTS)}
    gone = (*expert_tensors("blk.0"), "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight")
    rule = {"expert_gating_func": 3, "expert_weights_norm": False, "expert_weights_scale": 2.5}
    metadata: dict[str, MetadataValue] = {f"qwen3moe.{key}": value for key, value in rule.items()}
    spec = spec_of(make_file("qwen3moe", metadata, dense | fused, gone))
    assert spec.layers[0].ffn == DenseFfn(96, Activation.SILU)
    wanted = ExpertsFfn(FF, Activation.SILU, EXPERTS, 3, Gating.SOFTMAX_SELECTED, False, 2.5, fused_gate_up=True)
    assert spec.layers[1].ffn == wanted


@pytest.mark.parametrize(
    ("metadata", "without", "message"),
    [
        ({"qwen3moe.expert_used_count": 9}, (), "9 of 8 experts for each token; lamina runs up to 32"),
        ({"qwen3moe.expert_used_count": 0}, (), "expert_used_count must be a whole number above 0, is 0"),
        ({"qwen3moe.expert_gating_func": 2}, (), "expert_gating_func is 2; lamina knows 1, 3"),
        ({"qwen3moe.expert_weights_norm": 1}, (), "expert_weights_norm must be true or false, is 1"),
        ({"qwen3moe.expert_count": 7}, (), r"expected blk\.0\.ffn_gate_inp\.weight of shape \[64, 7\], found"),
        ({}, ("qwen3moe.expert_count",), "metadata has no qwen3moe.expert_count"),
        ({}, ("blk.1.ffn_down_exps.weight",), r"blk\.1\.ffn_down_exps\.weight \[32, 64, 8\] is missing"),
        ({}, ("blk.1.ffn_gate_inp.weight",), r"blk\.1\.ffn_gate\.weight \[64, 96\] is missing"),
    ],
)
def test_odd_experts_name_what_is_wrong(
    metadata: dict[str, MetadataValue], without: tuple[str, ...], message: str
) -> None:
    with pytest.raises((InvalidCheckpoint, UnsupportedModel), match=message):
        spec_of(make_file("qwen3moe", metadata, without=without))


@pytest.mark.parametrize("pattern", [(True,), (1, 0), (True, True, False)])
def test_odd_patterns_and_missing_routers_of_gpt_oss(pattern: MetadataValue) -> None:
    """A pattern needs one flag a layer, and there is no dense gpt-oss."""
    key = "gpt-oss.attention.sliding_window"
    with pytest.raises(InvalidCheckpoint, match="sliding_window_pattern must be 2 booleans"):
        spec_of(make_file("gpt-oss", {key: 128, f"{key}_pattern": pattern}))
    with pytest.raises(InvalidCheckpoint, match=r"blk\.0\.ffn_gate_inp\.weight is missing"):
        spec_of(make_file("gpt-oss", without=("blk.0.ffn_gate_inp.weight",)))


def test_biases_of_experts_are_floats() -> None:
    """A-04: like any vector, though they have two dimensions."""
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up_exps\.bias Q8_0 \[32, 8\] has a type"):
        spec_of(make_file("gpt-oss", types={"blk.0.ffn_up_exps.bias": GgmlType.Q8_0}))


def test_weight_bytes_of_experts_by_hand() -> None:
    """B-42: matrices by their type, biases and router as they lie (float32), all experts counted."""
    file = make_file("gpt-oss", types={"exps.weight": GgmlType.MXFP4, "attn_": GgmlType.F32})
    found = WeightBytes(spec_of(file), file.tensors, {}).of(LayerRange(0, 1))
    matrices = EXPERTS * (2 * FF * row_bytes(GgmlType.MXFP4, HIDDEN) + HIDDEN * row_bytes(GgmlType.MXFP4, FF))
    biases = 4 * EXPERTS * (2 * FF + HIDDEN + 1)
    q, kv = HEADS * DIM, KV_HEADS * DIM
    attention = 4 * (HIDDEN * (q + 2 * kv) + q + 2 * kv + q * HIDDEN + HIDDEN + HEADS)
    others = 4 * (HIDDEN * EXPERTS + 2 * HIDDEN) + 4 * HIDDEN * VOCAB + 4 * DIM // 2
    assert found == matrices + biases + attention + others


def test_the_arena_has_a_place_for_every_selected_expert() -> None:
    """B-28: router logits, ids, shares, and the experts' intermediate values, row by row."""
    settings = StageSettings(max_rows=7, max_seqs=2, max_logit_rows=2, max_context=64, kv_dtype="f32")
    spec = spec_of(make_file("qwen3moe"))
    shapes = {
        item.name: (item.rows, item.columns, item.dtype) for item in arena_layout(spec, LayerRange(0, 1), settings)
    }
    assert shapes["gate"] == (7, 3 * FF, "f32")
    assert shapes["gate_logits"] == (7, EXPERTS, "f32")
    assert shapes["experts"] == (7, 3, "i32")
    assert shapes["shares"] == (7, 3, "f32")


def gpt_oss_20b() -> tuple[ModelSpec, TensorIndex]:
    """The published shape, with the types that llama.cpp gives rows that are no multiple of 256."""
    rope = RopeSpec(RopeLayout.NEOX, 64, 150000.0, YarnScaling(32.0, 4096))
    attention = AttentionSpec(64, 8, 64, 64, 0.125, rope, qkv_bias=True, output_bias=True, sinks=True)
    ffn = ExpertsFfn(2880, Activation.SWIGLU_CLAMPED, 32, 4, Gating.SOFTMAX_SELECTED, normalise=False, bias=True)
    layers = tuple(
        LayerSpec(i, replace(attention, window=None if i % 2 else 128), ffn, i % 2, ffn_norm="post_attention_norm")
        for i in range(24)
    )
    groups = (CacheGroup(0, CacheKind.WINDOW, 128), CacheGroup(1, CacheKind.FULL))
    spec = ModelSpec("gpt-oss", "gpt-oss-20b", "d", layers, 201088, 2880, 131072, 1e-5, False, 1.0, None, groups)
    types = {"token_embd.weight": GgmlType.Q5_0, "output.weight": GgmlType.Q8_0, "attn_output.weight": GgmlType.Q4_K}
    types |= {"attn_q.weight": GgmlType.Q5_0, "attn_k.weight": GgmlType.Q5_0, "attn_v.weight": GgmlType.Q8_0}

    def type_of(name: str) -> GgmlType:
        return GgmlType.MXFP4 if name.endswith("exps.weight") else types.get(own_name(name), GgmlType.F32)

    def own_name(name: str) -> str:
        return name.split(".", 2)[2] if name.startswith("blk.") else name

    shapes = stage_tensor_shapes(spec, spec.all_layers)
    return spec, TensorIndex(TensorInfo(name, type_of(name), shape, PATH, 0, 0) for name, shape in shapes.items())


def test_gpt_oss_20b_by_the_planner() -> None:
    """C-08: 10.8 GiB of weights and 3.0 GiB of cache at a context of 131072, both within 5 %; 14.31 GiB within 5 %.

    The 12 layers that see all tokens have the 3.0 GiB; what the others keep does not depend on the context.
    """
    spec, tensors = gpt_oss_20b()
    gib = 2**30
    settings = StageSettings(max_rows=512, max_seqs=1, max_logit_rows=1, max_context=131072, kv_dtype="f16")
    memory = StageCosts(Demand(spec, tensors, settings, 131072), {}).of(spec.all_layers)
    assert memory.weight_bytes / gib == pytest.approx(10.8, rel=0.05)
    assert memory.kv_bytes / gib == pytest.approx(3.0, rel=0.05)
    assert memory.arena_bytes < 0.2 * gib
    assert memory.total_bytes / gib == pytest.approx(14.31, rel=0.05)
    per_group = [kv_block_bytes(spec, spec.all_layers, group.index, settings) for group in spec.cache_groups]
    assert [size * settings.max_blocks_per_seq / gib for size in per_group] == [3.0, 3.0]
    by_context = [Demand(spec, tensors, replace(settings, max_context=n), n).num_blocks for n in (8192, 131072)]
    window, full = (group.index for group in spec.cache_groups)
    assert by_context[0][window] == by_context[1][window] == (127 + 512) // 16 + 2 + 4 * 512 // 16
    assert [counts[full] for counts in by_context] == [512, 8192]
