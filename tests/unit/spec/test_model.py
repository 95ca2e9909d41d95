"""LayerRange, and the values and tensors of a range of layers, computed by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.errors import InvalidCheckpoint, InvalidSplit
from lamina.spec.memory import WeightBytes
from lamina.spec.model import (
    Activation,
    AttentionSpec,
    CacheGroup,
    CacheKind,
    DenseFfn,
    LayerRange,
    LayerSpec,
    ModelSpec,
    RopeLayout,
    RopeSpec,
    layer_tensor_shapes,
    stage_tensor_names,
    stage_tensor_shapes,
)
from lamina.spec.quant import GgmlType

HIDDEN, VOCAB, FF = 48, 100, 80
FULL, WINDOW = CacheGroup(0, CacheKind.FULL), CacheGroup(1, CacheKind.WINDOW, 128)
ATTENTION = AttentionSpec(
    num_heads=6, num_kv_heads=2, key_dim=16, value_dim=8, scale=0.25, rope=RopeSpec(RopeLayout.NEOX, 16, 10000.0)
)


def make_spec(num_layers: int = 4, tied: bool = False, attention: AttentionSpec = ATTENTION) -> ModelSpec:
    """Odd layers attend to a window of 128."""
    layers = tuple(
        LayerSpec(i, replace(attention, window=128 if i % 2 else None), DenseFfn(FF, Activation.SILU), i % 2)
        for i in range(num_layers)
    )
    return ModelSpec(
        architecture="llama", name="toy", digest="d", layers=layers, vocab_size=VOCAB, hidden=HIDDEN,
        context_length=4096, norm_eps=1e-5, tie_embeddings=tied, embedding_scale=1.0, final_softcap=None,
        cache_groups=(FULL, WINDOW),
    )  # fmt: skip


def index_of(shapes: dict[str, tuple[int, ...]]) -> TensorIndex:
    """Tensors of the given shapes, as F32."""
    infos = []
    for name, shape in shapes.items():
        num_values = 1
        for size in shape:
            num_values *= size
        infos.append(TensorInfo(name, GgmlType.F32, shape, Path("m.gguf"), 0, 4 * num_values))
    return TensorIndex(infos)


@given(st.integers(0, 999_998), st.integers(1, 999))
def test_a_range_survives_its_text(start: int, length: int) -> None:
    layers = LayerRange(start, min(start + length, 999_999))
    assert LayerRange.parse(str(layers)) == layers
    assert len(layers) == layers.stop - layers.start == len(list(layers))


def test_a_range_as_users_type_it() -> None:
    assert LayerRange.parse("0-11") == LayerRange(0, 12)
    assert LayerRange.parse(" 3 - 3 ") == LayerRange.parse("3") == LayerRange(3, 4)
    assert (str(LayerRange(0, 12)), str(LayerRange(3, 4))) == ("0-11", "3")
    assert 11 in LayerRange(0, 12)
    assert 12 not in LayerRange(0, 12)
    assert list(LayerRange(2, 4)) == [2, 3]


@pytest.mark.parametrize("text", ["", "-", "5-", "-5", "3-2", "0..4", "a-b", "1-2-3", "٣-٤", "1" * 5000, "1\n-2x"])
def test_a_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidSplit):
        LayerRange.parse(text)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (-1, 4)])
def test_an_empty_or_negative_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(InvalidSplit, match="empty or negative"):
        LayerRange(start, stop)


def test_a_range_beyond_the_model_is_refused() -> None:
    with pytest.raises(InvalidSplit, match="layers 2-4 do not exist: toy has layers 0-3"):
        make_spec().layers_of(LayerRange(2, 5))


def test_kv_values_by_hand() -> None:
    """B-13: K and V have widths of their own, and groups are counted apart."""
    spec = make_spec()
    per_layer = 2 * 16 + 2 * 8
    assert spec.kv_values_per_token(spec.all_layers) == 4 * per_layer
    assert spec.kv_values_per_token(LayerRange(0, 3)) == 3 * per_layer
    assert spec.kv_values_per_token(LayerRange(0, 3), group=0) == 2 * per_layer
    assert spec.kv_values_per_token(LayerRange(0, 3), group=1) == per_layer


LAYER_NAMES = (
    "attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight",
    "ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
)  # fmt: skip


def test_tensors_of_first_middle_and_last_stage() -> None:
    spec = make_spec()
    tensors = index_of(stage_tensor_shapes(spec, spec.all_layers))
    layer = [tuple(f"blk.{i}.{name}" for name in LAYER_NAMES) for i in range(4)]
    assert stage_tensor_names(spec, LayerRange(0, 1), tensors) == ("token_embd.weight", *layer[0])
    assert stage_tensor_names(spec, LayerRange(1, 3), tensors) == (*layer[1], *layer[2])
    last = (*layer[3], "output_norm.weight", "output.weight")
    assert stage_tensor_names(spec, LayerRange(3, 4), tensors) == last
    assert set(stage_tensor_names(spec, spec.all_layers, tensors)) == set(tensors)


def test_tied_embeddings_are_on_both_ends_and_once_in_one_stage() -> None:
    spec = make_spec(tied=True)
    tensors = index_of(stage_tensor_shapes(spec, spec.all_layers))
    assert "output.weight" not in tensors
    ends = [stage_tensor_names(spec, LayerRange(cut, cut + 1), tensors) for cut in range(4)]
    assert ["token_embd.weight" in names for names in ends] == [True, False, False, True]
    assert stage_tensor_names(spec, spec.all_layers, tensors).count("token_embd.weight") == 1


def test_rope_freqs_is_replicated_and_has_half_the_dims() -> None:
    rope = replace(ATTENTION.rope, has_freq_factors=True)
    spec = make_spec(attention=replace(ATTENTION, rope=rope))
    for cut in range(4):
        assert stage_tensor_shapes(spec, LayerRange(cut, cut + 1))["rope_freqs.weight"] == (8,)


def test_scales_beside_a_weight_come_with_it() -> None:
    spec = make_spec()
    shapes = stage_tensor_shapes(spec, spec.all_layers) | {
        "blk.1.ffn_up.scale": (1,), "blk.1.ffn_up.input_scale": (1,), "output.scale": (1,),
    }  # fmt: skip
    tensors = index_of(shapes)
    names = stage_tensor_names(spec, LayerRange(1, 2), tensors)
    at = names.index("blk.1.ffn_up.weight")
    assert names[at + 1 : at + 3] == ("blk.1.ffn_up.scale", "blk.1.ffn_up.input_scale")
    assert len(names) == len(LAYER_NAMES) + 2
    assert "output.scale" in stage_tensor_names(spec, LayerRange(3, 4), tensors)


def stored_bytes(spec: ModelSpec, layers: LayerRange, tensors: TensorIndex) -> int:
    return sum(tensors[name].num_bytes for name in stage_tensor_names(spec, layers, tensors))


def test_weight_bytes_by_hand() -> None:
    """B-42: tensors outside a stage's layers are not counted."""
    spec = make_spec()
    tensors = index_of(stage_tensor_shapes(spec, spec.all_layers))
    layer = 2 * HIDDEN + HIDDEN * (6 * 16 + 2 * 16 + 2 * 8) + (6 * 8) * HIDDEN + 3 * HIDDEN * FF
    embedding = HIDDEN * VOCAB
    assert stored_bytes(spec, LayerRange(0, 1), tensors) == 4 * (layer + embedding)
    assert stored_bytes(spec, LayerRange(1, 3), tensors) == 4 * 2 * layer
    assert stored_bytes(spec, LayerRange(3, 4), tensors) == 4 * (layer + embedding + HIDDEN)
    assert stored_bytes(spec, spec.all_layers, tensors) == sum(tensors[name].num_bytes for name in tensors)


def test_weight_bytes_of_a_missing_tensor() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"no tensor blk\.0\.attn_q\.weight"):
        WeightBytes(make_spec(), index_of({"token_embd.weight": (HIDDEN, VOCAB)}), {})


def test_optional_tensors_of_a_layer() -> None:
    attention = replace(ATTENTION, qkv_bias=True, output_bias=True, qk_norm=True, sinks=True)
    layer = LayerSpec(7, attention, DenseFfn(FF, Activation.SILU), 0)
    extra = (
        layer_tensor_shapes(layer, HIDDEN).items()
        - layer_tensor_shapes(replace(layer, attention=ATTENTION), HIDDEN).items()
    )
    assert dict(extra) == {
        "blk.7.attn_q.bias": (96,), "blk.7.attn_k.bias": (32,), "blk.7.attn_v.bias": (16,),
        "blk.7.attn_q_norm.weight": (16,), "blk.7.attn_k_norm.weight": (16,),
        "blk.7.attn_sinks.weight": (6,), "blk.7.attn_output.bias": (48,),
    }  # fmt: skip
    fused = layer_tensor_shapes(replace(layer, fused_qkv=True), HIDDEN)
    assert (fused["blk.7.attn_qkv.weight"], fused["blk.7.attn_qkv.bias"]) == ((48, 144), (144,))
    assert not {"blk.7.attn_q.weight", "blk.7.attn_k.bias"} & fused.keys()


def test_a_spec_whose_parts_contradict_each_other_is_refused() -> None:
    spec = make_spec()
    with pytest.raises(InvalidCheckpoint, match="the layer at place 0 has index 1"):
        replace(spec, layers=spec.layers[1:])
    with pytest.raises(InvalidCheckpoint, match="layer 1 names cache group 1"):
        replace(spec, cache_groups=(FULL,))
    with pytest.raises(InvalidCheckpoint, match="layer 0 and its cache group differ in their window"):
        replace(spec, cache_groups=(WINDOW, FULL))


def test_a_spec_can_be_compared_and_hashed() -> None:
    assert make_spec() == make_spec()
    assert hash(make_spec()) == hash(make_spec())
    assert make_spec() != make_spec(tied=True)
