"""The random weights that other tests rely on are decodable, finite, of ordinary size and use every code."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants

from support.tiny import ALL_TYPES, WEIGHT_RMS, random_blocks, write_tiny_llama

_T = GGMLQuantizationType


def test_every_type_that_gguf_decodes_is_covered() -> None:
    """A-03: the list of types is the decoder's own."""
    decodable = {_T.F32, _T.F16} | set(quants._type_traits)
    assert set(ALL_TYPES) == decodable


@pytest.mark.parametrize("tensor_type", ALL_TYPES, ids=lambda t: t.name)
def test_random_blocks_decode_to_ordinary_weights(tensor_type: GGMLQuantizationType) -> None:
    """A-03: finite values, mean near 0, rms near WEIGHT_RMS, nothing far out."""
    blocks = random_blocks(tensor_type, 48, 1024, np.random.default_rng(7))
    weights = quants.dequantize(blocks, tensor_type)
    assert blocks.dtype == np.uint8
    assert weights.shape == (48, 1024)
    rms = float(np.sqrt(np.mean(np.square(weights, dtype=np.float64))))
    assert 0.8 * WEIGHT_RMS < rms < 1.25 * WEIGHT_RMS
    assert abs(float(weights.mean())) < 0.05 * rms
    assert float(np.abs(weights).max()) < 8 * WEIGHT_RMS


@pytest.mark.parametrize("tensor_type", ALL_TYPES, ids=lambda t: t.name)
def test_random_blocks_depend_on_the_generator_only(tensor_type: GGMLQuantizationType) -> None:
    """The same seed gives the same bytes, another seed gives others."""
    first, again, other = (random_blocks(tensor_type, 4, 512, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_random_blocks_refuse_a_partial_block() -> None:
    """A row that is no whole number of blocks has no GGUF form."""
    with pytest.raises(ValueError, match="Q4_K stores blocks of 256 values"):
        random_blocks(_T.Q4_K, 2, 128, np.random.default_rng(0))


@pytest.mark.parametrize("tensor_type", [_T.Q4_0, _T.F32, _T.Q6_K, _T.NVFP4], ids=lambda t: t.name)
def test_tiny_llama_reads_back(tmp_path: Path, tensor_type: GGMLQuantizationType) -> None:
    """The gguf package reads the file, with the shapes and types that were asked for."""
    path = write_tiny_llama(tmp_path / "t.gguf", matrix_type=tensor_type, vector_type=_T.F16, hidden=256, ff=512)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert len(tensors) == 2 * 9 + 3
    assert tensors["blk.1.ffn_down.weight"].shape.tolist() == [512, 256]
    assert tensors["blk.1.attn_k.weight"].shape.tolist() == [256, 128]
    assert tensors["output.weight"].tensor_type == tensor_type
    gain = tensors["output_norm.weight"]
    assert gain.tensor_type == _T.F16
    assert 0.9 < float(np.mean(quants.dequantize(gain.data, _T.F16))) < 1.1
    decoded = quants.dequantize(tensors["token_embd.weight"].data, tensor_type)
    assert decoded.shape == (320, 256)
    assert np.isfinite(decoded).all()
