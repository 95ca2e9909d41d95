"""Two real cards of one process: copies between them, a split over them, and a card beside the host's CPU."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import DType
from lamina.kernels.registry import create_backend, present_devices
from lamina.spec.placement import StageSettings
from support.loopback import Cluster, Talk, TinyModel, run_scene, running_worker
from support.tiny import write_tiny_llama

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
GOLDENS: dict[str, Any] = json.loads((TESTS / "goldens/tiny_models.json").read_text())["models"]
SETTINGS = StageSettings(max_rows=64, max_seqs=4, max_logit_rows=4, max_context=128, kv_dtype="f16")
ROWS, COLUMNS = 2048, 3584


@pytest.fixture(scope="module")
def cards() -> Iterator[tuple[Backend, Backend]]:
    if len(present_devices()) < 3:
        pytest.skip("needs two GPUs")
    pair = create_backend("cuda:0"), create_backend("cuda:1")
    yield pair
    for backend in pair:
        backend.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("cards") / "m.gguf"
    return TinyModel.open(write_tiny_llama(path, matrix_type=GGMLQuantizationType.Q4_K, hidden=256, ff=512, layers=4))


def test_copies_keep_the_order_of_both_streams(
    cards: tuple[Backend, Backend], caplog: pytest.LogCaptureFixture
) -> None:
    """As large as a prompt's hidden state, back and forth without a wait, bit for bit; how they go is said once."""
    caplog.set_level(logging.INFO)
    one, two = cards
    rng = np.random.default_rng(1)
    for backend in cards:
        backend.bind_to_thread()
    buffers = [backend.alloc((ROWS, COLUMNS), DType.F32) for backend in (one, two, one)]
    written, taken = one.create_event(), two.create_event()
    for _ in range(3):
        values = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        one.bind_to_thread()
        one.upload(buffers[0], values)
        one.record_event(written)
        two.bind_to_thread()
        two.follow(written)
        two.copy_from(one, buffers[0], buffers[1], ROWS)
        two.record_event(taken)
        one.bind_to_thread()
        one.follow(taken)
        one.upload(buffers[0], np.zeros((ROWS, COLUMNS), np.float32))
        one.copy_from(two, buffers[1], buffers[2], ROWS)
        assert np.array_equal(one.download(buffers[2], ROWS), values)
    one.free(buffers[0])
    one.free(buffers[2])
    two.bind_to_thread()
    two.free(buffers[1])
    said = [record.getMessage() for record in caplog.records if "peer access" in record.getMessage()]
    assert len(said) in (0, 2), "once for each direction, here or in a test before this one"


def greedy(
    model: TinyModel,
    *workers: tuple[str, ...],
    cuts: tuple[int, ...],
    devices: tuple[str, ...],
    prompt: Sequence[int] = (5, 17, 90, 33, 2),
    num_tokens: int = 40,
) -> list[int]:
    """Tokens of one stream by real daemons on loopback, `workers` named a, b with these devices."""
    made: list[int] = []

    async def scene() -> None:
        names = ("a", "b")[: len(workers)]
        daemons = [running_worker(name, given) for name, given in zip(names, workers, strict=True)]
        running = [await daemon.__aenter__() for daemon in daemons]
        try:
            async with Cluster.over(model, *running, settings=SETTINGS) as cluster:
                pipeline = await cluster.deploy(cuts, devices)
                made.extend(await Talk(pipeline, prompt).run(num_tokens, ahead=4))
        finally:
            for daemon in daemons:
                await daemon.__aexit__(None, None, None)

    run_scene(scene)
    return made


@pytest.fixture(scope="module")
def whole(model: TinyModel) -> list[int]:
    return greedy(model, ("cuda:0",), cuts=(), devices=("a",))


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,)])
def test_one_daemon_over_two_cards(
    cards: tuple[Backend, Backend], model: TinyModel, whole: list[int], cuts: tuple[int, ...]
) -> None:
    """Hidden states and tokens pass from card to card: bit for bit what one card computes."""
    assert greedy(model, ("cuda:0", "cuda:1"), cuts=cuts, devices=("a/0", "a/1")) == whole


def test_stages_in_turn_on_two_cards(cards: tuple[Backend, Backend], model: TinyModel, whole: list[int]) -> None:
    assert greedy(model, ("cuda:0", "cuda:1"), cuts=(1, 2, 3), devices=("a/0", "a/1", "a/0", "a/1")) == whole


@pytest.mark.parametrize("cpu_first", [True, False])
@pytest.mark.parametrize("num_daemons", [1, 2])
def test_a_cpu_beside_a_card(num_daemons: int, cpu_first: bool) -> None:
    """C-12: in one daemon through the host, in two over the wire, in either order: the goldens' text."""
    golden = GOLDENS["qwen3"]
    model = TinyModel.open(TESTS / "data" / golden["file"])
    kinds = ("cpu", "cuda:0") if cpu_first else ("cuda:0", "cpu")
    workers, devices = ((kinds,), ("a/0", "a/1")) if num_daemons == 1 else ((kinds[:1], kinds[1:]), ("a", "b"))
    for prompt in golden["prompts"]:
        made = greedy(model, *workers, cuts=(1,), devices=devices, prompt=prompt["tokens"], num_tokens=12)
        assert made == prompt["greedy"][:12]
