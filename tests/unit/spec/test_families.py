"""GGUF metadata -> ModelSpec for each family, and what is refused."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from lamina.spec.checkpoint import TensorIndex, TensorInfo
from lamina.spec.errors import InvalidCheckpoint, UnsupportedModel
from lamina.spec.families import cache_groups, check_tensors, model_spec
from lamina.spec.gguf import GgufFile, MetadataValue, read_gguf
from lamina.spec.model import (
    CacheGroup,
    CacheKind,
    LayerRange,
    LinearScaling,
    NoScaling,
    RopeLayout,
    RopeScaling,
    YarnScaling,
    stage_tensor_names,
)
from lamina.spec.quant import GgmlType
from support.models import smollm2_path
from support.tiny import write_tiny_llama

PATH = Path("toy.gguf")
HIDDEN, FF, VOCAB, HEADS, KV_HEADS = 64, 96, 50, 4, 2


def make_file(
    arch: str = "llama",
    metadata: Mapping[str, MetadataValue] | None = None,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    without: tuple[str, ...] = (),
    head_dim: int = 16,
    kv_heads: tuple[int, ...] = (KV_HEADS, KV_HEADS),
) -> GgufFile:
    """A header of two layers. `metadata` and `tensors` are added to it, keys and names in `without` left out."""
    keys: dict[str, MetadataValue] = {
        "block_count": len(kv_heads), "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": FF,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }  # fmt: skip
    values = {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in keys.items()},
        **(metadata or {}),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (HIDDEN, VOCAB), "output_norm.weight": (HIDDEN,)}
    for index, num_kv_heads in enumerate(kv_heads):
        shapes |= {
            f"blk.{index}.{name}": shape
            for name, shape in {
                "attn_norm.weight": (HIDDEN,), "attn_q.weight": (HIDDEN, HEADS * head_dim),
                "attn_k.weight": (HIDDEN, num_kv_heads * head_dim), "attn_v.weight": (HIDDEN, num_kv_heads * head_dim),
                "attn_output.weight": (HEADS * head_dim, HIDDEN), "ffn_norm.weight": (HIDDEN,),
                "ffn_gate.weight": (HIDDEN, FF), "ffn_up.weight": (HIDDEN, FF), "ffn_down.weight": (FF, HIDDEN),
            }.items()
        }  # fmt: skip
    shapes.update(tensors or {})
    infos = [TensorInfo(name, GgmlType.F32, shape, PATH, 0, 0) for name, shape in shapes.items() if name not in without]
    kept = {key: value for key, value in values.items() if key not in without}
    return GgufFile(PATH, 3, kept, TensorIndex(infos), ())


QWEN2_BIASES = {f"blk.{i}.attn_{x}.bias": (HEADS * 16 if x == "q" else KV_HEADS * 16,) for i in (0, 1) for x in "qkv"}
QWEN3_NORMS = {f"blk.{i}.attn_{x}_norm.weight": (32,) for i in (0, 1) for x in "qk"}


def test_smollm2() -> None:
    model = read_gguf(smollm2_path())
    spec = model_spec(model, "digest")
    assert (spec.architecture, spec.num_layers, spec.hidden, spec.vocab_size) == ("llama", 30, 576, 49152)
    assert (spec.context_length, spec.tie_embeddings, spec.digest) == (8192, True, "digest")
    attention = spec.layers[29].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.key_dim, attention.value_dim) == (9, 3, 64, 64)
    assert (attention.rope.layout, attention.rope.dims, attention.rope.freq_base) == (RopeLayout.NORM, 64, 100000.0)
    assert attention.scale == 0.125
    assert (attention.qkv_bias, attention.qk_norm, attention.rope.has_freq_factors) == (False, False, False)
    assert spec.kv_values_per_token(spec.all_layers) == 30 * 2 * 3 * 64


def test_smollm2_weight_bytes_by_hand() -> None:
    """B-42: Q4_1 matrices (20 B per 32 values), a Q8_0 embedding (34 B), F32 norms, tied."""
    model = read_gguf(smollm2_path())
    spec = model_spec(model, "digest")
    layer = (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536) // 32 * 20 + 2 * 576 * 4
    embedding = 576 * 49152 // 32 * 34

    def stored_bytes(layers: LayerRange) -> int:
        return sum(model.tensors[name].num_bytes for name in stage_tensor_names(spec, layers, model.tensors))

    assert stored_bytes(spec.all_layers) == 30 * layer + embedding + 576 * 4
    assert stored_bytes(LayerRange(0, 20)) == 20 * layer + embedding
    assert stored_bytes(LayerRange(10, 20)) == 10 * layer
    assert stored_bytes(LayerRange(20, 30)) == 10 * layer + embedding + 576 * 4


def test_a_generated_model(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", matrix_type=gguf.GGMLQuantizationType.Q4_K)
    spec = model_spec(read_gguf(path), "d")
    assert (spec.name, spec.num_layers, spec.hidden, spec.vocab_size) == ("tiny-llama-Q4_K", 2, 256, 320)
    assert not spec.tie_embeddings
    assert spec.layers[1].attention.rope.scaling == NoScaling()


def test_qwen2_has_biases_and_rotates_halves() -> None:
    attention = model_spec(make_file("qwen2", tensors=QWEN2_BIASES), "d").layers[0].attention
    assert (attention.rope.layout, attention.qkv_bias, attention.qk_norm) == (RopeLayout.NEOX, True, False)
    with pytest.raises(InvalidCheckpoint, match=r"tensor blk\.0\.attn_q\.bias \[64\] is missing"):
        model_spec(make_file("qwen2"), "d")


def test_qwen3_has_head_norms_and_a_head_size_of_its_own() -> None:
    lengths = {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32}
    attention = model_spec(make_file("qwen3", lengths, QWEN3_NORMS, head_dim=32), "d").layers[1].attention
    assert (attention.rope.layout, attention.qkv_bias, attention.qk_norm) == (RopeLayout.NEOX, False, True)
    assert (attention.key_dim, attention.rope.dims) == (32, 32)
    assert attention.scale == pytest.approx(32**-0.5)
    with pytest.raises(InvalidCheckpoint, match=r"attn_q_norm\.weight \[32\] is missing"):
        model_spec(make_file("qwen3", lengths, head_dim=32), "d")


def test_what_the_tensors_say() -> None:
    extra = {"rope_freqs.weight": (8,), "output.weight": (HIDDEN, VOCAB), "blk.1.attn_output.bias": (HIDDEN,)}
    spec = model_spec(make_file(tensors=extra), "d")
    assert spec.layers[0].attention.rope.has_freq_factors
    assert not spec.tie_embeddings
    assert [layer.attention.output_bias for layer in spec.layers] == [False, True]


def test_fused_qkv() -> None:
    fused = {"blk.0.attn_qkv.weight": (HIDDEN, (HEADS + 2 * KV_HEADS) * 16)}
    apart = tuple(f"blk.0.attn_{x}.weight" for x in "qkv")
    spec = model_spec(make_file(tensors=fused, without=apart), "d")
    assert [layer.fused_qkv for layer in spec.layers] == [True, False]


def test_kv_heads_per_layer() -> None:
    spec = model_spec(make_file(metadata={"llama.attention.head_count_kv": (4, 1)}, kv_heads=(4, 1)), "d")
    assert [layer.attention.num_kv_heads for layer in spec.layers] == [4, 1]
    assert spec.kv_values_per_token(spec.all_layers) == 2 * 16 * (4 + 1)


def test_kv_heads_default_to_the_heads() -> None:
    spec = model_spec(make_file(without=("llama.attention.head_count_kv",), kv_heads=(HEADS, HEADS)), "d")
    assert spec.layers[0].attention.num_kv_heads == HEADS


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, NoScaling()),
        ({"scaling.type": "none", "scaling.factor": 4.0}, NoScaling()),
        ({"scaling.type": "linear", "scaling.factor": 8.0}, LinearScaling(8.0)),
        ({"scale_linear": 2.0}, LinearScaling(2.0)),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, YarnScaling(4.0, 512)),
        (
            {
                "scaling.type": "yarn", "scaling.factor": 32.0, "scaling.original_context_length": 4096,
                "scaling.yarn_beta_fast": 64.0, "scaling.yarn_beta_slow": 2.0, "scaling.attn_factor": 0.5,
                "scaling.yarn_ext_factor": 0.9, "scaling.yarn_attn_factor": 3.0,
            },
            YarnScaling(32.0, 4096, ext_factor=0.9, attn_factor=1.5, beta_fast=64.0, beta_slow=2.0),
        ),
    ],
)  # fmt: skip
def test_rope_scaling(keys: dict[str, MetadataValue], expected: RopeScaling) -> None:
    spec = model_spec(make_file(metadata={f"llama.rope.{key}": value for key, value in keys.items()}), "d")
    assert spec.layers[0].attention.rope.scaling == expected


def test_a_name_is_made_printable_and_falls_back_to_the_file() -> None:
    assert model_spec(make_file(), "d").name == "toy"
    assert model_spec(make_file(metadata={"general.name": "a\n\udcffb"}), "d").name == "a??b"


@pytest.mark.parametrize(
    ("metadata", "without", "message"),
    [
        ({}, ("general.architecture",), "metadata has no general.architecture"),
        ({"general.architecture": 3}, (), "general.architecture must be a string, is 3"),
        ({}, ("llama.block_count",), "metadata has no llama.block_count"),
        ({"llama.block_count": 2**32 - 1}, (), r"llama.block_count is 4294967295, but there are only 20 tensors"),
        ({"llama.block_count": 3}, (), r"tensor blk\.2\.attn_norm\.weight \[64\] is missing"),
        ({"llama.block_count": 1}, (), r"tensor blk\.1\.attn_norm\.weight F32 \[64\] has no place"),
        ({"llama.block_count": True}, (), "llama.block_count must be a whole number above 0, is True"),
        ({"llama.embedding_length": 0}, (), "llama.embedding_length must be a whole number above 0, is 0"),
        ({"llama.embedding_length": -64}, (), "llama.embedding_length must be a whole number above 0, is -64"),
        ({"llama.context_length": "512"}, (), "llama.context_length must be a whole number above 0, is '512'"),
        ({"llama.attention.head_count_kv": 3}, (), "layer 0 has 4 heads, no multiple of its 3 kv heads"),
        ({"llama.attention.head_count_kv": (2,)}, (), "head_count_kv has 1 values for 2 layers"),
        ({"llama.attention.head_count_kv": (2, 0)}, (), "head_count_kv must be a whole number above 0, is 0"),
        ({"llama.attention.head_count": 6}, (), "metadata has no llama.attention.key_length"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, (), "epsilon must be a number above 0, is nan"),
        ({"llama.rope.freq_base": float("inf")}, (), "freq_base must be a number above 0, is inf"),
        ({"llama.rope.freq_base": 0.0}, (), "freq_base must be a number above 0, is 0.0"),
        ({"llama.rope.dimension_count": 15}, (), "dimension_count is 15, not an even number up to the head's 16"),
        ({"llama.rope.dimension_count": 32}, (), "dimension_count is 32, not an even number up to the head's 16"),
        ({}, ("token_embd.weight",), "no tensor token_embd.weight"),
        ({}, ("output_norm.weight",), r"tensor output_norm\.weight \[64\] is missing"),
        ({"general.architecture": "mamba"}, (), "architecture 'mamba' is none of gpt-oss, llama, qwen2, qwen3"),
        ({"llama.rope.scaling.type": "longrope"}, (), "rope.scaling.type is 'longrope'"),
    ],
)
def test_missing_and_odd_headers_name_what_is_wrong(
    metadata: dict[str, MetadataValue], without: tuple[str, ...], message: str
) -> None:
    with pytest.raises((InvalidCheckpoint, UnsupportedModel), match=message):
        model_spec(make_file(metadata=metadata, without=without), "d")


@pytest.fixture
def refit() -> Callable[..., TensorIndex]:
    def change(name: str, **changes: object) -> TensorIndex:
        tensors = make_file().tensors
        return TensorIndex(replace(t, **changes) if t.name == name else t for t in tensors.values())  # type: ignore[arg-type]

    return change


def test_a_wrong_shape_says_expected_and_found(refit: Callable[..., TensorIndex]) -> None:
    spec = model_spec(make_file(), "d")
    expected = (
        r"toy: expected blk\.1\.ffn_down\.weight of shape \[96, 64\], found blk\.1\.ffn_down\.weight F32 \[64, 96\]"
    )
    with pytest.raises(InvalidCheckpoint, match=expected):
        check_tensors(spec, refit("blk.1.ffn_down.weight", shape=(HIDDEN, FF)))


@pytest.mark.parametrize("kind", [GgmlType.I32, GgmlType.F64])
def test_a_type_that_is_no_weight_is_refused(kind: GgmlType, refit: Callable[..., TensorIndex]) -> None:
    spec = model_spec(make_file(), "d")
    with pytest.raises(UnsupportedModel, match=rf"blk\.0\.attn_q\.weight {kind.name} \[64, 64\] has a type"):
        check_tensors(spec, refit("blk.0.attn_q.weight", type=kind))


def test_a_vector_is_a_float_of_any_kind(refit: Callable[..., TensorIndex]) -> None:
    """A-04"""
    spec = model_spec(make_file(), "d")
    for kind in (GgmlType.F32, GgmlType.F16, GgmlType.BF16):
        check_tensors(spec, refit("blk.0.attn_norm.weight", type=kind))
    with pytest.raises(UnsupportedModel, match="none of BF16, F16, F32"):
        check_tensors(spec, refit("blk.0.attn_norm.weight", type=GgmlType.Q8_0))


def test_a_tensor_that_would_be_left_out_is_refused() -> None:
    """A bias that nobody adds changes the text silently."""
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_down\.bias F32 \[64\] has no place in a llama model"):
        model_spec(make_file(tensors={"blk.0.ffn_down.bias": (HIDDEN,)}), "d")


def test_scales_beside_weights_are_known_and_scalar() -> None:
    model_spec(make_file(tensors={"blk.0.ffn_up.scale": (1,), "blk.0.ffn_up.input_scale": (1,)}), "d")
    with pytest.raises(InvalidCheckpoint, match=r"expected blk\.0\.ffn_up\.scale of shape \[1\]"):
        model_spec(make_file(tensors={"blk.0.ffn_up.scale": (96,)}), "d")


def test_cache_groups_are_one_per_window() -> None:
    assert cache_groups([None, None]) == (CacheGroup(0, CacheKind.FULL),)
    assert cache_groups([128, None, 128, None]) == (
        CacheGroup(0, CacheKind.WINDOW, 128),
        CacheGroup(1, CacheKind.FULL),
    )
