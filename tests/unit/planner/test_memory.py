"""Planned bytes are the bytes that backends really take: weights, cache and arena (B-12, B-27 .. B-29, B-42)."""

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from rich.console import Console

from lamina.coordinator.cli.progress import split_table
from lamina.coordinator.planner.memory import RESERVE_SHARE, Demand, StagePlan, check_fits, plan_stages, stage_memory
from lamina.coordinator.session import SessionSettings, SplitChoice
from lamina.kernels.buffer import StepLimits
from lamina.kernels.cuda.workspace import region_sizes
from lamina.kernels.ledger import LedgerBackend
from lamina.kernels.mock import MockBackend
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.describe import device_profile
from lamina.rpc_worker.stage import Stage
from lamina.spec.digest import model_digest
from lamina.spec.errors import CapacityExceeded
from lamina.spec.families import model_spec
from lamina.spec.gguf import GgufFile, read_gguf
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.memory import StageMemory, arena_layout
from lamina.spec.model import LayerRange, ModelSpec
from lamina.spec.placement import KV_DTYPES, StageSettings
from support.planner_models import demand_of, device
from support.tiny import write_tiny_llama

T = GGMLQuantizationType
DATA = Path(__file__).parents[2] / "data"
SETTINGS = StageSettings(max_rows=24, max_seqs=3, max_logit_rows=2, max_context=100)


def opened(path: Path) -> tuple[GgufFile, ModelSpec]:
    file = read_gguf(path)
    return file, model_spec(file, model_digest(file))


@pytest.fixture(scope="module", params=["Q4_K untied", "Q8_0 tied", "rope factors", "biases"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufFile, ModelSpec]:
    path = tmp_path_factory.mktemp("planned") / "tiny.gguf"
    match request.param:
        case "Q4_K untied":
            write_tiny_llama(path, matrix_type=T.Q4_K, hidden=256, ff=256, layers=3)
        case "Q8_0 tied":
            write_tiny_llama(path, matrix_type=T.Q8_0, hidden=128, ff=64, layers=3, heads=4, tied=True)
        case "rope factors":
            path = DATA / "tiny_llama3.gguf"
        case _:
            path = DATA / "tiny_qwen2.gguf"
    return opened(path)


@pytest.mark.parametrize("backend_type", [MockBackend, ReferenceBackend])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_predicted_is_taken(model: tuple[GgufFile, ModelSpec], backend_type: type[LedgerBackend], stages: int) -> None:
    """For each stage of a split, to the byte, each of the three parts."""
    file, spec = model
    bounds = [*range(stages), spec.num_layers]
    for start, stop in pairwise(bounds):
        backend, layers = backend_type(), LayerRange(start, stop)
        profile = device_profile(DeviceId(WorkerName("a"), 0), backend, backend.device_facts())
        demand = Demand(spec, file.tensors, SETTINGS, 500)
        planned = stage_memory(demand, profile, layers)
        stage = Stage(backend, spec, layers, SETTINGS)
        stage.load(file.tensors, lambda done: None)
        assert planned.weight_bytes == stage.weight_bytes
        assert planned.arena_bytes == stage.arena_bytes
        assert planned.weight_bytes + planned.arena_bytes == backend.ledger.used_bytes
        stage.allocate_cache(demand.num_blocks)
        assert planned.kv_bytes == stage.cache_bytes
        assert planned.total_bytes == backend.ledger.used_bytes
        stage.free()
        assert backend.ledger.used_bytes == 0


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_cache_of_every_dtype(tmp_path: Path, kv_dtype: str) -> None:
    """B-12: q8_0 is 34 bytes for 32 values."""
    path = write_tiny_llama(tmp_path / "a.gguf", matrix_type=T.F32, hidden=128, ff=32, layers=2, heads=4)
    file, spec = opened(path)
    settings = replace(SETTINGS, kv_dtype=kv_dtype)
    backend = MockBackend()
    stage = Stage(backend, spec, spec.all_layers, settings)
    stage.load(file.tensors, lambda done: None)
    stage.allocate_cache((9,))
    values = 9 * 16 * 2 * 2 * 2 * 32  # blocks, tokens, layers, K and V, kv heads, dim
    expected = {"f32": 4 * values, "f16": 2 * values, "bf16": 2 * values, "q8_0": values // 32 * 34}[kv_dtype]
    assert stage.cache_bytes == expected == 9 * sum(stage.block_bytes())
    assert stage_memory(Demand(spec, file.tensors, settings, 9 * 16), device(0, 1, 32.0), spec.all_layers).kv_bytes == (
        expected
    )


def test_only_the_ends_have_their_buffers(model: tuple[GgufFile, ModelSpec]) -> None:
    """B-28: token ids on the first stage, logits on the last."""
    _, spec = model
    names = [
        {item.name for item in arena_layout(spec, layers, SETTINGS)}
        for layers in (LayerRange(0, 1), LayerRange(1, 2), LayerRange(spec.num_layers - 1, spec.num_layers))
    ]
    assert ["tokens" in part for part in names] == [True, False, False]
    assert ["logits" in part for part in names] == [False, False, True]
    whole = {item.name: item for item in arena_layout(spec, spec.all_layers, SETTINGS)}
    assert whole["logits"].num_bytes == 4 * 2 * spec.vocab_size
    assert whole["hidden"].num_bytes == 4 * 24 * spec.hidden
    assert whole["blocks.0"].num_bytes == 4 * 3 * 7


def plan_on(number: int, free: int, layers: LayerRange) -> StagePlan:
    return StagePlan(device(number, free, 32.0), layers, StageMemory(600 * 2**20, 300 * 2**20, 100 * 2**20))


GIB = 2**30


def test_check_fits_lists_every_stage_that_does_not() -> None:
    good, small, tiny = (
        plan_on(0, 2 * GIB, LayerRange(0, 2)),
        plan_on(1, GIB, LayerRange(2, 4)),
        plan_on(2, GIB // 2, LayerRange(4, 5)),
    )
    check_fits([good])
    with pytest.raises(CapacityExceeded) as caught:
        check_fits([good, small, tiny])
    assert str(caught.value) == (
        "the split does not fit: layers 2-3 on w1/0 need 1000.0 MiB (weights 600.0, cache 300.0, arena 100.0),"
        " 972.8 MiB are free there, less 5% in reserve; layers 4 on w2/0 need 1000.0 MiB"
        " (weights 600.0, cache 300.0, arena 100.0), 486.4 MiB are free there, less 5% in reserve"
    )


def test_two_stages_of_one_device_are_counted_together() -> None:
    """P-21: each fits alone, both do not."""
    check_fits([plan_on(0, 2 * GIB, LayerRange(0, 1))])
    with pytest.raises(CapacityExceeded, match=r"layers 0 and 2-3 on w0/0 need 2000.0 MiB \(weights 1200.0"):
        check_fits(
            [
                plan_on(0, 2 * GIB, LayerRange(0, 1)),
                plan_on(1, 2 * GIB, LayerRange(1, 2)),
                plan_on(0, 2 * GIB, LayerRange(2, 4)),
            ]
        )


def test_plans_keep_their_order() -> None:
    demand = demand_of(3, [32, 64, 32])
    devices = [device(i, GIB, 32.0) for i in range(2)]
    first, second = plan_stages(demand, devices, [LayerRange(0, 1), LayerRange(1, 3)])
    assert (first.device.id, first.layers) == (devices[0].id, LayerRange(0, 1))
    assert (second.device.id, second.layers) == (devices[1].id, LayerRange(1, 3))
    with pytest.raises(ValueError, match="zip"):
        plan_stages(demand, devices, [LayerRange(0, 3)])


@pytest.mark.parametrize("total_gib", [4, 8, 24, 80, 141])
@pytest.mark.parametrize(("max_in", "max_out"), [(1536, 49152), (18944, 152064), (29568, 152064)])
def test_the_reserve_covers_the_workspace(total_gib: int, max_in: int, max_out: int) -> None:
    """What `plan` does not count, a GPU's workspace, is below what it leaves free, with default settings."""
    settings = StageSettings(max_rows=512, max_seqs=8, max_logit_rows=8, max_context=4096)
    limits = StepLimits(settings.max_rows, settings.max_seqs, settings.max_logit_rows, settings.max_blocks_per_seq)
    sizes = region_sizes(limits, max_in, max_out, total_gib << 30, 132)
    assert 0 < sum(sizes.values()) < RESERVE_SHARE * (total_gib << 30)


def test_the_table_of_a_split_fits_80_columns() -> None:
    """Sizes of large cards, a longish name; the line above says for which settings."""
    plan = replace(
        plan_on(0, 141 * GIB, LayerRange(10, 100)),
        device=replace(device(0, 141 * GIB, 4.5), id=DeviceId(WorkerName("machine-number-10"), 10), kind="cuda"),
        memory=StageMemory(70 * GIB, 9 * GIB, GIB),
    )
    session = SessionSettings((), SplitChoice(), StageSettings(max_seqs=16, max_context=8192), 131072)
    text = io.StringIO()
    Console(file=text, width=80).print(split_table([plan] * 12, session))
    line, *table = text.getvalue().splitlines()
    assert "131072 tokens in f16 (--context 8192 --parallel 16)" in line
    assert len(table) == 1 + 12 + 1  # no row is folded
