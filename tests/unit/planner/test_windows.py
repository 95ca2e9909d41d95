"""Blocks by cache group: what is wanted for a model with a sliding window, and what workers with little room get."""

from dataclasses import replace
from pathlib import Path

import pytest

from lamina.coordinator.cli.plan import window_lines
from lamina.coordinator.cluster.client import StageLoaded
from lamina.coordinator.cluster.deploy import agree_on_blocks
from lamina.coordinator.planner.memory import RESERVE_SHARE, Demand
from lamina.spec.checkpoint import TensorIndex
from lamina.spec.digest import model_digest
from lamina.spec.errors import CapacityExceeded
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.memory import sliding_windows
from lamina.spec.model import CacheGroup, CacheKind, ModelSpec
from lamina.spec.placement import StageSettings, StageSpec

PATH = Path(__file__).parents[2] / "data/tiny_gpt_oss.gguf"
SETTINGS = StageSettings(max_rows=32, max_seqs=2, max_logit_rows=2, max_context=1024)
WINDOW_BLOCKS = 2 * 4 + 4 * 2  # 2 sequences of ceil(39 / 16) + 1, and 4 chunks of 32 ahead


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    file = read_gguf(PATH)
    return model_spec(file, model_digest(file))


def demand_of(spec: ModelSpec, *, gives_back: bool = True) -> Demand:
    return Demand(spec, TensorIndex(()), SETTINGS, 2048, gives_back)


def loaded(demand: Demand, free_bytes: float) -> StageLoaded:
    """One stage of the whole model; a block is 100 bytes where all positions are kept, 30 elsewhere."""
    sizes = tuple(100 if window is None else 30 for window in demand.windows)
    stage = StageSpec(0, DeviceId(WorkerName("a"), 0), demand.spec.all_layers)
    return StageLoaded(stage, 0, 0, int(free_bytes / (1 - RESERVE_SHARE)) + 1, sizes)


def by_kind(demand: Demand, counts: tuple[int, ...]) -> tuple[int, int]:
    """(blocks where all positions are kept, blocks of the window)."""
    kept = demand.windows.index(None)
    return counts[kept], counts[1 - kept]


def test_a_window_is_wanted_for_each_sequence_of_a_step(spec: ModelSpec) -> None:
    """Whatever the context; who plans steps alone, and never gives back, keeps all positions."""
    assert by_kind(demand_of(spec), demand_of(spec).num_blocks) == (128, WINDOW_BLOCKS)
    assert demand_of(spec, gives_back=False).num_blocks == (128, 128)
    assert demand_of(spec, gives_back=False).windows == (None, None)


def test_the_plan_says_what_windows_keep(spec: ModelSpec) -> None:
    """Only where that is less than all."""
    (line,) = window_lines(demand_of(spec))
    assert line == "layers with a window of 8 tokens keep 256 positions of KV over all sequences, the others 2048"
    assert not window_lines(demand_of(spec, gives_back=False))


def test_no_more_than_all_positions(spec: ModelSpec) -> None:
    """A window wider than the context is no reason for more blocks."""
    short = replace(SETTINGS, max_context=64, max_seqs=2)
    assert Demand(spec, TensorIndex(()), short, 128).num_blocks == (8, 8)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (1e9, (128, WINDOW_BLOCKS)),
        (100 * 100 + 30 * WINDOW_BLOCKS, (100, WINDOW_BLOCKS)),
        (64 * 100 + 30 * WINDOW_BLOCKS, (64, WINDOW_BLOCKS)),
    ],
)
def test_what_is_short_comes_off_the_longest(spec: ModelSpec, room: float, expected: tuple[int, int]) -> None:
    """The windows are cheap and all sequences need them."""
    demand = demand_of(spec)
    assert by_kind(demand, agree_on_blocks(demand, [loaded(demand, room)])) == expected


def test_less_than_a_context_is_refused(spec: ModelSpec) -> None:
    demand = demand_of(spec)
    with pytest.raises(CapacityExceeded, match="a context of 1024 tokens needs"):
        agree_on_blocks(demand, [loaded(demand, 63 * 100 + 30 * WINDOW_BLOCKS)])


def test_one_group_keeps_all_positions(spec: ModelSpec) -> None:
    """Where no layer has full attention, that of the widest window."""
    assert sorted(map(str, sliding_windows(spec))) == ["8", "None"]
    kinds = [CacheGroup(index, CacheKind.WINDOW, window) for index, window in enumerate((8, 64))]
    layers = tuple(replace(layer, cache_group=0, attention=replace(layer.attention, window=8)) for layer in spec.layers)
    assert sliding_windows(replace(spec, cache_groups=tuple(kinds), layers=layers)) == (8, None)
