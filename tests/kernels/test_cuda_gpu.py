"""What only a real card can show: other threads beside a capture, memory over many captures, events, pinned memory."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import GraphError
from lamina.kernels.buffer import DType, StepShape
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.card import Card
from lamina.kernels.cuda.driver import Driver
from lamina.kernels.cuda.libcuda import load_driver
from lamina.spec.quant import GgmlType
from support import op_oracle
from support.backends import BACKENDS, Bench, create_or_skip
from support.gpu import MIB, used_bytes

pytestmark = pytest.mark.gpu


@pytest.fixture
def bench() -> Iterator[Bench]:
    backend = create_or_skip(BACKENDS["cuda"])
    yield Bench(backend, BACKENDS["cuda"], np.random.default_rng(0))
    backend.close()


def _small_step(bench: Bench, rows: int) -> tuple[ops.Args, np.ndarray]:
    """Operands of a linear of `rows` rows, and its result."""
    weight, (matrix,), _ = bench.weight((GgmlType.Q4_K, 512), cols=512)
    values = bench.normal(rows, 512)
    args = {"x": bench.floats(values), "weight": weight, "out": bench.output(rows, 512)}
    return args, values.astype(np.float64) @ op_oracle.decoded(matrix).T


def _linear(bench: Bench, args: ops.Args) -> None:
    ops.linear(bench.backend, args["x"], args["weight"], args["out"])  # type: ignore[arg-type]


def test_other_threads_may_allocate_during_a_capture(bench: Bench) -> None:
    """B-09: capture is thread_local, so threads that allocate, copy, wait and free beside it neither break it nor are
    broken.

    Waiting for the whole device is another matter: it would wait for the stream that is being captured.
    """
    args, wanted = _small_step(bench, 100)
    stop, under_way = threading.Event(), threading.Event()

    def allocate() -> int:
        library = load_driver()
        card = Card(library, 0)
        card.open()
        stream = Driver(library, card.create_stream(), dependent_launch=False)
        num_rounds = 0
        while not stop.is_set():
            pinned, address = card.alloc_pinned(3 * MIB), card.allocate(3 * MIB)
            stream.upload(address, pinned.ctypes.data, 3 * MIB)
            stream.synchronize()
            card.free(address)
            num_rounds += 1
            under_way.set()
        card.close()
        return num_rounds

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(allocate)
        try:
            under_way.wait(10)
            for rows in (100, 1, 7):
                graph = bench.backend.capture(lambda: _linear(bench, args), StepShape(rows, 1, 0))
                bench.backend.replay(graph, StepShape(rows, 1, 0))
                found = bench.read(args["out"])[:rows]  # type: ignore[arg-type]
                bench.assert_close("linear", found, wanted[:rows])
                graph.destroy()
        finally:
            stop.set()
        assert beside.result() > 0


def _linears(bench: Bench, args: ops.Args, count: int) -> None:
    for _ in range(count):
        _linear(bench, args)


def test_captures_leave_no_memory_behind(bench: Bench) -> None:
    """C-15: a hundred recordings made, replayed and destroyed take less than 16 MiB, decode and prefill alike."""
    args, _ = _small_step(bench, 300)

    def cycle() -> None:
        for rows in (1, 4, 300):
            graph = bench.backend.capture(
                lambda: [_linear(bench, args) for _ in range(20)] and None, StepShape(rows, 1, 0)
            )
            bench.backend.replay(graph, StepShape(rows, 1, 0))
            graph.destroy()
        bench.backend.synchronize()

    cycle()
    grown = []  # by round: a leak grows in each, another process's memory comes and goes
    for _ in range(4):
        before = used_bytes()
        for _ in range(33):
            cycle()
        grown.append(used_bytes() - before)
    assert min(grown) < 16 * MIB, grown


def test_a_second_thread_binds_and_launches(bench: Bench) -> None:
    """B-04: the device is current wherever bind_to_thread was called."""
    args, wanted = _small_step(bench, 5)
    found: list[np.ndarray] = []

    def work() -> None:
        bench.backend.bind_to_thread()
        bench.step(5)
        _linear(bench, args)
        found.append(bench.read(args["out"]))  # type: ignore[arg-type]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    bench.assert_close("linear", found[0], wanted)


def test_two_backends_share_a_card_and_nothing_else(bench: Bench) -> None:
    """Two stages on one GPU: each has its own stream, workspace and graphs."""
    other = Bench(CudaBackend(), BACKENDS["cuda"], np.random.default_rng(1))
    steps = [(b, *_small_step(b, 9)) for b in (bench, other)]
    graphs = [b.backend.capture(lambda b=b, args=args: _linear(b, args), StepShape(9, 1, 0)) for b, args, _ in steps]
    with pytest.raises(GraphError, match="own recordings"):
        other.backend.replay(graphs[0], StepShape(9, 1, 0))
    for _ in range(20):
        for (b, _, _), graph in zip(steps, graphs, strict=True):
            b.backend.replay(graph, StepShape(9, 1, 0))
    for b, args, wanted in steps:
        b.assert_close("linear", b.read(args["out"]), wanted)  # type: ignore[arg-type]
    other.backend.close()


def test_events_and_pinned_memory(bench: Bench) -> None:
    """B-10: pinned memory is zeroed; an event marks the end of what was launched."""
    pinned = bench.backend.alloc_pinned(4096)
    assert pinned.nbytes == 4096
    assert not pinned.any()
    values = pinned.view(np.float32).reshape(2, 512)
    values[:] = bench.normal(2, 512)
    x, out = bench.floats(values), bench.output(2, 512)
    bench.step(2)
    ops.add(bench.backend, x, x, out)
    event = bench.backend.create_event()
    bench.backend.record_event(event)
    bench.backend.wait_event(event)
    assert np.array_equal(bench.read(out), values + values)


def test_the_card_describes_itself(bench: Bench) -> None:
    """Name with ordinal, and memory asked of the driver."""
    facts = bench.backend.device_facts()
    assert facts.kind == "cuda"
    assert "cuda:0" in facts.name
    assert 0 < facts.free_bytes <= facts.total_bytes
    free_of_limit = CudaBackend(max_memory_bytes=64 * MIB)
    buffer = free_of_limit.alloc((1024, 1024), DType.F32)
    assert free_of_limit.device_facts().free_bytes == 60 * MIB
    free_of_limit.free(buffer)
    free_of_limit.close()
