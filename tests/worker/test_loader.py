"""What a stage reads: its own tensors, once, nothing else; refused before reading when memory is short."""

import logging
import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from lamina.kernels.mock import MockBackend
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.loader import StageLoader, TensorReader
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.weights import StageWeights
from lamina.spec.digest import model_digest
from lamina.spec.errors import CapacityExceeded, InvalidCheckpoint
from lamina.spec.families import model_spec
from lamina.spec.gguf import GgufFile, read_gguf
from lamina.spec.memory import arena_bytes, stage_weight_bytes_on
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from lamina.spec.quant import WEIGHT_TYPES
from support.inprocess import InProcessModel
from support.tiny import ALL_TYPES, random_blocks, write_tiny_llama

T = GGMLQuantizationType
SETTINGS = StageSettings(max_rows=8, max_seqs=2, max_logit_rows=2, max_context=64, kv_dtype="f32")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def opened(path: Path) -> tuple[GgufFile, ModelSpec]:
    file = read_gguf(path)
    return file, model_spec(file, model_digest(file))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loader") / "tiny.gguf"
    return write_tiny_llama(path, matrix_type=T.Q8_0, hidden=64, ff=96, layers=4, tied=request.param)


def load(path: Path, layers: LayerRange) -> tuple[StageWeights, TensorReader]:
    file, spec = opened(path)
    with TensorReader(lambda done: None) as reader:
        return StageLoader(MockBackend(), spec, file.tensors, reader).load(layers), reader


def test_a_load_is_timed_against_the_disk(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says how long it took and what the disk alone would have allowed, which is never less."""
    with caplog.at_level(logging.INFO, "lamina.rpc_worker.loader"):
        _, reader = load(tiny, opened(tiny)[1].all_layers)
    found = re.search(r"([\d.]+) MiB in [\d.]+ s, (\d+) MiB/s; the disk alone: (\d+) MiB/s", caplog.text)
    assert found is not None
    mib, rate, disk = (float(text) for text in found.groups())
    assert mib == pytest.approx(reader.bytes_read / 2**20, abs=0.05)
    assert 0 < rate <= disk


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2, 3)])
def test_stages_read_their_own_tensors_once(tiny: Path, cuts: tuple[int, ...]) -> None:
    """B-42, B-43: the ranges of all stages are the file's tensors; what both ends need is read twice when tied."""
    file, spec = opened(tiny)
    names = {(info.offset_bytes, info.num_bytes): name for name, info in file.tensors.items()}
    bounds = [0, *cuts, spec.num_layers]
    read: list[str] = []
    for start, stop in pairwise(bounds):
        _, reader = load(tiny, LayerRange(start, stop))
        own = [names[offset, size] for _, offset, size in reader.ranges]
        assert reader.bytes_read == sum(size for _, _, size in reader.ranges)
        for name in own:
            if name.startswith("blk."):
                assert start <= int(name.split(".")[1]) < stop, "tensors of other stages are not read"
        read += own
    expected = list(file.tensors)
    if spec.tie_embeddings and cuts:
        expected.append("token_embd.weight")
    assert sorted(read) == sorted(expected)


def test_split_files_are_read_in_each_part(tmp_path: Path) -> None:
    """B-43: a model in two files; each stage opens the parts it needs."""
    whole = write_tiny_llama(tmp_path / "whole.gguf", matrix_type=T.F32, hidden=32, ff=32, layers=2)
    parts = write_split(whole, tmp_path)
    file, spec = opened(parts[0])
    assert {info.file for info in file.tensors.values()} == set(parts)
    with TensorReader(lambda done: None) as reader:
        StageLoader(MockBackend(), spec, file.tensors, reader).load(spec.all_layers)
    assert {path for path, _, _ in reader.ranges} == set(parts)
    assert reader.bytes_read == sum(tensor.num_bytes for tensor in file.tensors.values())
    split, one = (InProcessModel(path, ReferenceBackend(), settings=SETTINGS) for path in (parts[1], whole))
    assert (split.step({0: PROMPT}) == one.step({0: PROMPT})).all()


def write_split(whole: Path, folder: Path) -> list[Path]:
    """The same model in two parts, odd tensors in the second."""
    reader = GGUFReader(whole)
    paths = [folder / f"part-0000{n}-of-00002.gguf" for n in (1, 2)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        for key, field in reader.fields.items():
            if not number and not key.startswith("GGUF.") and key != "general.architecture":
                sub = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.mark.parametrize("layers", [LayerRange(0, 4), LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)], ids=str)
def test_refused_just_below_what_is_needed(tiny: Path, layers: LayerRange) -> None:
    """B-42, B-29: one byte too little is refused with numbers before a single byte is read; just enough loads."""
    file, spec = opened(tiny)
    bits = dict.fromkeys(WEIGHT_TYPES, 32.0)
    needed = stage_weight_bytes_on(spec, layers, file.tensors, bits) + arena_bytes(spec, layers, SETTINGS)

    def stage_on(num_bytes: int) -> tuple[Stage, ReferenceBackend]:
        backend = ReferenceBackend(max_memory_bytes=num_bytes)
        return Stage(backend, spec, layers, SETTINGS), backend

    stage, backend = stage_on(needed - 1)
    with pytest.raises(CapacityExceeded, match=rf"layers {layers} need [\d.]+ MiB \(weights [\d.]+, arena [\d.]+\), "):
        stage.load(file.tensors, lambda done: pytest.fail("something was read"))
    assert backend.ledger.used_bytes == 0
    stage, backend = stage_on(needed)
    stage.load(file.tensors, lambda done: None)
    assert backend.ledger.used_bytes == needed == stage.weight_bytes + stage.arena_bytes
    stage.free()
    stage.free()
    assert backend.ledger.used_bytes == 0


def test_a_file_that_shrinks_while_it_is_read(tiny: Path, tmp_path: Path) -> None:
    """The header was sound; the missing bytes are named, and nothing stays allocated."""
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny.read_bytes())
    file, spec = opened(path)
    backend = ReferenceBackend()
    stage = Stage(backend, spec, spec.all_layers, SETTINGS)

    def truncate(done: int) -> None:
        os.truncate(path, file.file_bytes // 2)

    with pytest.raises(InvalidCheckpoint, match=r"short.gguf: tensor .* ends after \d+ of \d+ bytes; copy it again"):
        stage.load(file.tensors, truncate)
    assert backend.ledger.used_bytes == 0


def test_a_file_that_goes_away(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "gone.gguf"
    path.write_bytes(tiny.read_bytes())
    file, spec = opened(path)
    path.unlink()
    with pytest.raises(InvalidCheckpoint, match=r"gone.gguf: tensor token_embd.weight cannot be read: No such file"):
        Stage(ReferenceBackend(), spec, spec.all_layers, SETTINGS).load(file.tensors, lambda done: None)


@pytest.mark.parametrize("fail_at", range(0, 40, 3))
def test_a_failure_anywhere_frees_everything(tiny: Path, fail_at: int) -> None:
    """Stopped after any number of tensors (a client that goes away), no buffer and no weight is left."""
    file, spec = opened(tiny)
    backend = ReferenceBackend()
    calls = 0

    def progress(done: int) -> None:
        nonlocal calls
        calls += 1
        if calls > fail_at:
            raise InterruptedError

    stage = Stage(backend, spec, spec.all_layers, SETTINGS)
    if fail_at >= len(file.tensors):
        stage.load(file.tensors, progress)
        stage.free()
    else:
        with pytest.raises(InterruptedError):
            stage.load(file.tensors, progress)
    assert backend.ledger.used_bytes == 0


def rewritten(source: Path, target: Path, changes: "dict[str, list[tuple[str, T, np.ndarray]]]") -> Path:
    """A copy of a file where some tensors are replaced by others (name, type, data as stored)."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        for name, kind, data in changes.get(tensor.name, [(tensor.name, tensor.tensor_type, tensor.data)]):
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def dequantised(source: Path, target: Path) -> Path:
    """The same weights in float32."""
    changes = {
        tensor.name: [(tensor.name, T.F32, quants.dequantize(tensor.data, tensor.tensor_type))]
        for tensor in GGUFReader(source).tensors
    }
    return rewritten(source, target, changes)


def logits_of(path: Path, cuts: tuple[int, ...] = ()) -> np.ndarray:
    model = InProcessModel(path, ReferenceBackend(), cuts, SETTINGS)
    logits = [model.step({0: PROMPT}), model.step({0: [7]})]
    model.free()
    return np.concatenate(logits)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_every_block_type_gives_its_values(kind: T, tmp_path: Path) -> None:
    """A-03: a model of each type has the logits of the same weights in float32, and they are finite."""
    path = write_tiny_llama(tmp_path / "a.gguf", matrix_type=kind, hidden=256, ff=256, layers=1, vocab=272)
    found = logits_of(path)
    assert np.isfinite(found).all()
    assert found.std() > 0
    assert (found == logits_of(dequantised(path, tmp_path / "b.gguf"))).all()


@pytest.mark.parametrize("kind", [T.F16, T.BF16], ids=lambda kind: kind.name)
def test_vectors_of_half_precision(kind: T, tmp_path: Path) -> None:
    """A-04: norms in 16 bits."""
    path = write_tiny_llama(tmp_path / "a.gguf", matrix_type=T.Q8_0, vector_type=kind, hidden=64, ff=64, layers=1)
    assert (logits_of(path) == logits_of(dequantised(path, tmp_path / "b.gguf"))).all()


def test_fused_qkv(tmp_path: Path) -> None:
    """attn_qkv is q, k and v by rows."""
    path = write_tiny_llama(tmp_path / "a.gguf", matrix_type=T.Q8_0, hidden=64, ff=64, layers=2)
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    changes: dict[str, list[tuple[str, T, np.ndarray]]] = {}
    for layer in range(2):
        q, k, v = (f"blk.{layer}.attn_{part}.weight" for part in "qkv")
        fused = np.concatenate([tensors[name] for name in (q, k, v)])
        changes |= {q: [(f"blk.{layer}.attn_qkv.weight", T.Q8_0, fused)], k: [], v: []}
    fused_path = rewritten(path, tmp_path / "b.gguf", changes)
    assert opened(fused_path)[1].layers[0].fused_qkv
    assert (logits_of(fused_path, (1,)) == logits_of(path)).all()


@pytest.fixture
def scaled(tmp_path: Path) -> tuple[Path, Path]:
    """An NVFP4 file with scales beside some weights, and the product of both in float32."""
    source = write_tiny_llama(tmp_path / "a.gguf", matrix_type=T.NVFP4, hidden=64, ff=128, layers=2)
    rng = np.random.default_rng(0)
    with_scales: dict[str, list[tuple[str, T, np.ndarray]]] = {}
    products: dict[str, list[tuple[str, T, np.ndarray]]] = {}
    for tensor in GGUFReader(source).tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        scale = np.float32(rng.uniform(0.5, 2))
        if tensor.name.startswith("blk.") and tensor.tensor_type == T.NVFP4:
            stem = tensor.name.removesuffix(".weight")
            with_scales[tensor.name] = [
                (tensor.name, tensor.tensor_type, tensor.data),
                (f"{stem}.scale", T.F32, np.array([scale], np.float32)),
                (f"{stem}.input_scale", T.F32, np.array([123.0], np.float32)),
            ]
            values = values * scale
        products[tensor.name] = [(tensor.name, T.F32, values)]
    return (
        rewritten(source, tmp_path / "scaled.gguf", with_scales),
        rewritten(source, tmp_path / "product.gguf", products),
    )


def test_nvfp4_scales_are_applied(scaled: tuple[Path, Path]) -> None:
    """A weight is its blocks times the scalar beside it; input_scale is for quantised activations and not read."""
    path, product = scaled
    assert (logits_of(path, (1,)) == logits_of(product)).all()
    file, spec = opened(path)
    with TensorReader(lambda done: None) as reader:
        StageLoader(MockBackend(), spec, file.tensors, reader).load(spec.all_layers)
    unread = sum(4 for name in file.tensors if name.endswith(".input_scale"))
    assert unread == 4 * 14
    assert reader.bytes_read == sum(tensor.num_bytes for tensor in file.tensors.values()) - unread


def test_scaled_weights_are_counted_as_float32(scaled: tuple[Path, Path]) -> None:
    """B-42: what is predicted is what lies in memory, also on a device that keeps NVFP4 as it is."""
    file, spec = opened(scaled[0])
    for layers in (spec.all_layers, LayerRange(0, 1), LayerRange(1, 2)):
        with TensorReader(lambda done: None) as reader:
            weights = StageLoader(MockBackend(), spec, file.tensors, reader).load(layers)
        bits = {kind: MockBackend().weight_bits(kind) for kind in WEIGHT_TYPES}
        assert stage_weight_bytes_on(spec, layers, file.tensors, bits) == weights.num_bytes


def test_random_blocks_differ_between_tensors() -> None:
    """The models above would prove little if all their weights were the same."""
    rng = np.random.default_rng(0)
    assert (random_blocks(T.Q4_K, 1, 256, rng) != random_blocks(T.Q4_K, 1, 256, rng)).any()
