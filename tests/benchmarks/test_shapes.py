"""Generated model files: lamina reads them, their weights decode to sound values, the mix is llama.cpp's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shapes
from gguf import GGMLQuantizationType, quants

from lamina.coordinator.model_file import open_model_file
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.model import ExpertsFfn
from lamina.spec.quant import GgmlType
from support.models import smollm2_path

SMALL = {
    "llama": replace(
        shapes.SHAPES["llama1b"], layers=4, hidden=256, ff=512, heads=4, kv_heads=2, vocab=49200, context=512
    ),
    "qwen2": replace(
        shapes.SHAPES["qwen05b"], layers=2, hidden=64, ff=96, heads=2, kv_heads=1, head_dim=32, vocab=49152, tied=False
    ),
    "qwen3moe": replace(
        shapes.SHAPES["moe1b"], layers=2, hidden=256, ff=256, heads=4, kv_heads=2, context=512, experts=4, selected=2
    ),
}


@pytest.fixture(scope="module", params=sorted(SMALL))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[shapes.Shape, Path]:
    shape = SMALL[request.param]
    path = tmp_path_factory.mktemp("shapes") / shape.file_name
    shapes.write_shape(shape, path, smollm2_path())
    return shape, path


def test_lamina_reads_what_was_written(written: tuple[shapes.Shape, Path]) -> None:
    shape, path = written
    file = read_gguf(path)
    spec = model_spec(file, model_digest(file))
    attention = spec.layers[0].attention
    assert (spec.num_layers, spec.hidden, spec.vocab_size) == (shape.layers, shape.hidden, shape.vocab)
    assert (attention.num_heads, attention.num_kv_heads, attention.key_dim) == (
        shape.heads, shape.kv_heads, shape.head_dim,
    )  # fmt: skip
    assert spec.tie_embeddings == shape.tied
    ffn = spec.layers[1].ffn
    assert (ffn.num_experts, ffn.num_selected) == (4, 2) if isinstance(ffn, ExpertsFfn) else not shape.experts
    assert not list(path.parent.glob("*.partial"))


def test_tokenizer_is_smollm2s_whatever_the_vocabulary(written: tuple[shapes.Shape, Path]) -> None:
    text = "Why is the sky blue?"
    ids = open_model_file(written[1]).tokenizer.encode(text, add_special=True, parse_special=True)
    assert ids == open_model_file(smollm2_path()).tokenizer.encode(text, add_special=True, parse_special=True)


def test_same_seed_same_bytes(written: tuple[shapes.Shape, Path], tmp_path: Path) -> None:
    shape, path = written
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    shapes.write_shape(shape, again, smollm2_path())
    shapes.write_shape(shape, other, smollm2_path(), seed=2)
    assert again.read_bytes() == path.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_decode_to_values_that_keep_activations_in_size(kind: str) -> None:
    tensor = shapes.Tensor("matrix", GGMLQuantizationType[kind], 256, 1024)
    blocks = shapes.values_of(tensor, np.random.default_rng(5))
    assert blocks.nbytes == tensor.num_bytes
    values = quants.dequantize(np.asarray(blocks), tensor.kind)
    assert values.shape == (256, 1024)
    assert np.isfinite(values).all()
    rms = float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))
    assert rms == pytest.approx(1024**-0.5, rel=0.1)
    assert abs(float(values.mean())) < 0.12 * rms  # Q4_0 has one code more below 0 than above


def test_mix_of_llama_1b_is_q4_k_m() -> None:
    """Q6_K for attn_v and ffn_down of layers 0, 1, 4, 7, 10, 13, 14, 15 of 16 (models-and-formats, section 1)."""
    kinds = {tensor.name: tensor.kind.name for tensor in shapes.tensors_of(shapes.SHAPES["llama1b"])}
    better = [i for i in range(16) if kinds[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15]
    assert better == [i for i in range(16) if kinds[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert kinds["token_embd.weight"] == "Q6_K"  # tied: it is the output matrix
    assert {kinds[f"blk.3.{name}.weight"] for name in ("attn_q", "attn_k", "ffn_gate", "ffn_up")} == {"Q4_K"}
    assert "output.weight" not in kinds


def test_untied_shapes_have_an_output_matrix_of_its_own() -> None:
    kinds = {tensor.name: tensor.kind.name for tensor in shapes.tensors_of(shapes.SHAPES["qwen7b"])}
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("Q4_K", "Q6_K")
    assert kinds["blk.0.attn_q.bias"] == "F32"


def test_sizes_are_those_of_the_models() -> None:
    """Within 1 % of the published files of these shapes: 763 MiB is Llama-1B's in Q4_K_M, 4.36 GiB Qwen2.5-7B's."""

    def mib(name: str) -> float:
        return sum(tensor.num_bytes for tensor in shapes.tensors_of(shapes.SHAPES[name])) / 2**20

    assert mib("llama1b") == pytest.approx(763, rel=0.01)
    assert mib("qwen7b") == pytest.approx(4.36 * 1024, rel=0.01)


def test_quant_ids_are_the_formats() -> None:
    """The generator's type names mean to lamina what they mean to the gguf package."""
    for kind in ("Q4_K", "Q6_K", "Q8_0"):
        assert GgmlType[kind].value == GGMLQuantizationType[kind].value


def test_smollm2_must_have_been_fetched(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make models"):
        shapes.model_path("llama1b", tmp_path)
