"""What only the native CPU backend has: its library and instruction sets, tapes, threads, refusals of wild steps."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType, ExpertLimits, Extent, StepLimits, StepShape
from lamina.kernels.cpu import backend as cpu_backend
from lamina.kernels.cpu import library
from lamina.kernels.cpu.backend import CpuBackend, TapeGraph
from lamina.kernels.cpu.descriptors import Isa, OpDesc, OpKind
from lamina.kernels.cpu.threads import usable_cores
from lamina.kernels.ops import LaunchError
from lamina.kernels.registry import select_backend
from lamina.spec.errors import CapacityExceeded, InvalidConfig, InvalidPlan
from lamina.spec.quant import GgmlType
from support.backends import BACKENDS, Bench, create_or_skip
from support.mini_stage import MiniStage, Piece


@pytest.fixture
def bench() -> Iterator[Bench]:
    backend = create_or_skip(BACKENDS["cpu"])
    yield Bench(backend, BACKENDS["cpu"], np.random.default_rng(3))
    backend.close()


@pytest.fixture
def backend(bench: Bench) -> CpuBackend:
    assert isinstance(bench.backend, CpuBackend)
    return bench.backend


def _tape(backend: CpuBackend, launch_all: object) -> list[OpDesc]:
    graph = backend.capture(launch_all, StepShape(1, 1, 1))  # type: ignore[arg-type]
    assert isinstance(graph, TapeGraph)
    assert graph.tape is not None
    return list(graph.tape.ops)


def test_instruction_sets_are_executed_not_assumed(backend: CpuBackend) -> None:
    """The scalar set runs everywhere; the backend takes the best that ran and says which."""
    working = library.working_isas()
    assert Isa.SCALAR in working
    assert working[0].name.lower() in backend.capabilities.kernel
    assert not {Isa.NEON, Isa.AVX2} <= set(working)


def test_a_forced_instruction_set_is_obeyed_or_refused(monkeypatch: pytest.MonkeyPatch, backend: CpuBackend) -> None:
    """LAMINA_CPU_ISA forces one; a name that is none, or cannot run here, is an error and never another set."""
    monkeypatch.setenv(library.ISA_VARIABLE, "scalar")
    scalar = CpuBackend(threads=1)
    assert "scalar" in scalar.capabilities.kernel
    scalar.close()
    absent = next(isa for isa in Isa if isa not in library.working_isas())
    for name, reason in (("sse9", "is none of scalar"), (absent.name.lower(), "cannot run on this")):
        monkeypatch.setenv(library.ISA_VARIABLE, name)
        with pytest.raises(InvalidConfig, match=reason):
            CpuBackend(threads=1)


@pytest.mark.parametrize("threads", [0, 256, -1])
def test_impossible_thread_counts_are_refused(backend: CpuBackend, threads: int) -> None:
    with pytest.raises(InvalidConfig, match=f"threads={threads}"):
        CpuBackend(threads=threads)


def test_a_missing_library_is_unsupported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """B-02: without the library the backend says what to do, so that the registry falls back."""
    monkeypatch.setattr(library, "_candidates", lambda: iter([tmp_path / "absent.so"]))
    with pytest.raises(Unsupported, match=r"not built .*install lamina with a C\+\+ compiler"):
        library.load_library.__wrapped__()
    (tmp_path / "wrong.so").write_bytes(b"not a library")
    monkeypatch.setattr(library, "_candidates", lambda: iter([tmp_path / "wrong.so"]))
    with pytest.raises(Unsupported, match=r"cannot be loaded .* reinstall lamina"):
        library.load_library.__wrapped__()


@pytest.mark.parametrize("name", ["absent.so", "wrong.so"])
def test_a_library_that_was_named_is_the_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Who names a file wants no other kernels, ten times slower: the worker does not start."""
    (tmp_path / "wrong.so").write_bytes(b"not a library")
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / name))
    monkeypatch.setattr(cpu_backend, "load_library", library.load_library.__wrapped__)
    with pytest.raises(InvalidConfig, match=rf"^LAMINA_CPU_LIBRARY: \S+{name} cannot be loaded .*unset the variable$"):
        select_backend("cpu")


def test_a_library_of_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch, backend: CpuBackend) -> None:
    """A stale build beside a newer package must not be called, and an explicit one is an error of its own."""
    path = library.load_library().path
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    with pytest.raises(Unsupported, match="999"):
        library.load_library.__wrapped__()
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(path))
    with pytest.raises(InvalidConfig, match=r"LAMINA_CPU_LIBRARY: .* this package needs .*999"):
        library.load_library.__wrapped__()


@pytest.mark.parametrize("kind", [GgmlType.Q4_K, GgmlType.F32], ids=str)
def test_scratch_of_experts_is_taken_at_load(kind: GgmlType) -> None:
    """B-42: what workspace_bytes announced is what is taken, of every thread, and steps take nothing more."""
    backend = CpuBackend(threads=2)
    bench = Bench(backend, BACKENDS["cpu"], np.random.default_rng(5))
    limits = StepLimits(70, 4, 4, 8, ExpertLimits(6, 3, hidden=256, intermediate=512))
    backend.reserve_workspace(limits, 512, 1024)
    taken = backend._functions.lamina_team_scratch_bytes(backend._team)
    assert backend.workspace_bytes(limits, 512, 1024) <= taken < backend.workspace_bytes(limits, 512, 1024) + 8192
    both, _, _ = bench.weight(*[(kind, 512)] * 12, cols=256)
    down, _, _ = bench.weight(*[(kind, 256)] * 6, cols=512)
    for rows in (1, 70):
        chosen = bench.ints(np.stack([bench.rng.permutation(6)[:3] for _ in range(rows)]))
        x, out = bench.floats(bench.normal(rows, 256)), bench.output(rows, 3 * 512)
        bench.step(rows)
        ops.expert_gated_linear(backend, x, chosen, both, out, "silu")
        ops.expert_linear(backend, out, chosen, bench.floats(bench.normal(rows, 3)), down, x)
    assert backend._functions.lamina_team_scratch_bytes(backend._team) == taken
    backend.close()


def test_descriptors_match_the_library(backend: CpuBackend) -> None:
    assert library.load_library().functions.lamina_op_desc_bytes() == ctypes.sizeof(OpDesc)


def test_threads_default_to_usable_cores(backend: CpuBackend) -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert backend.capabilities.num_threads == backend.num_threads


@pytest.mark.parametrize(("cores", "size"), [(1, 1), (255, 255), (384, 255)])
def test_a_host_with_more_cores_than_a_team_has_threads(monkeypatch: pytest.MonkeyPatch, cores: int, size: int) -> None:
    """Nobody asked for a number, so none is refused."""
    monkeypatch.setattr(cpu_backend, "usable_cores", lambda: cores)
    assert cpu_backend._team_size(None) == size


def test_barriers_stand_only_where_ops_depend(bench: Bench, backend: CpuBackend) -> None:
    """Both ropes and the write of V share a region; whatever reads a result waits for it."""
    x = bench.output(4, 64)
    q, k = x.columns(0, 32), x.columns(32, 64)
    positions, freq = bench.ints([0, 1, 2, 3]), bench.vector([1.0, 0.1])

    def launch() -> None:
        ops.rope(backend, q, positions, freq, head_dim=32, layout="neox")
        ops.rope(backend, k, positions, freq, head_dim=32, layout="neox")
        ops.add(backend, q, k, q)
        ops.softcap(backend, k, 3.0)

    tape = _tape(backend, launch)
    kinds = [OpKind(op.kind) for op in tape]
    assert kinds == [OpKind.ROPE_TABLE, OpKind.ROPE, OpKind.ROPE, OpKind.ADD, OpKind.SOFTCAP]
    assert [op.barrier for op in tape] == [0, 1, 0, 1, 1]


def test_rope_tables_are_computed_once_per_step(bench: Bench, backend: CpuBackend) -> None:
    """Layers that rotate alike share a table; another magnitude, or positions written in between, need their own."""
    x, positions, freq = bench.output(4, 32), bench.ints([0, 1, 2, 3]), bench.vector([1.0, 0.1])

    def launch() -> None:
        for magnitude in (1.0, 1.0, 2.0, 1.0):
            ops.rope(backend, x, positions, freq, head_dim=32, layout="norm", magnitude=magnitude)
        ops.argmax(backend, x, positions)
        ops.rope(backend, x, positions, freq, head_dim=32, layout="norm")

    kinds = [OpKind(op.kind) for op in _tape(backend, launch)]
    assert kinds.count(OpKind.ROPE_TABLE) == 3
    assert kinds.count(OpKind.ROPE) == 5


def test_a_replay_after_a_free_is_refused(bench: Bench, backend: CpuBackend) -> None:
    """A tape holds addresses: once an operand is given back, it must not run."""
    x, y = bench.output(2, 8), bench.output(2, 8)
    graph = backend.capture(lambda: ops.add(backend, x, y, x), StepShape(2, 1, 0))
    backend.replay(graph, StepShape(2, 1, 0))
    backend.free(bench.output(1, 1))
    backend.replay(graph, StepShape(2, 1, 0))
    backend.free(y)
    with pytest.raises(LaunchError, match="freed"):
        backend.replay(graph, StepShape(2, 1, 0))


def test_a_replay_beyond_the_arena_is_refused(bench: Bench, backend: CpuBackend) -> None:
    """Each dimension of the shape on its own, also after smaller shapes have passed."""
    x, y = bench.output(4, 8), bench.output(3, 8)
    graph = backend.capture(lambda: ops.add(backend, x, y, x), StepShape(2, 1, 0))
    backend.replay(graph, StepShape(3, 1, 0))
    with pytest.raises(LaunchError, match="y has 3 rows, the step needs 4"):
        backend.replay(graph, StepShape(4, 1, 0))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("tokens", "token id"),
        ("slots", "slot"),
        ("positions", "position or block"),
        ("block_table", "position or block"),
        ("row_starts", "row_starts"),
        ("indices", "index"),
    ],
)
def test_a_step_that_names_what_does_not_exist_is_refused(bench: Bench, spoil: str, reason: str) -> None:
    """Design 8: wild tokens, slots, positions, blocks, rows and indices end the step; nothing outside is touched."""
    stage = MiniStage(bench)
    graph = bench.backend.capture(stage.launch_all, StepShape(1, 1, 1))
    piece = [Piece(0, [3, 4, 5], [7])]
    for wild in (-1, 1 << 30, -(1 << 31)):
        shape = stage.stage_inputs(piece, [2])
        buffer = getattr(stage, spoil)
        values = bench.read(buffer)
        values.reshape(-1)[1 if spoil == "row_starts" else 0] = wild
        bench.backend.upload(buffer, values)
        with pytest.raises(InvalidPlan, match=reason):
            bench.backend.replay(graph, shape)
    bench.backend.replay(graph, stage.stage_inputs(piece, [2]))
    assert np.isfinite(stage.results(StepShape(3, 1, 1))[1]).all()


def test_weights_occupy_what_the_planner_was_told(bench: Bench, backend: CpuBackend) -> None:
    """B-42: bits per value of the packed layout, F32 where a type has no kernel of its own."""
    for kind in (GgmlType.Q4_K, GgmlType.Q8_0, GgmlType.IQ1_S, GgmlType.F32):
        weight, _, _ = bench.weight((kind, 64), cols=1024)
        told = backend.weight_bits(kind) * 64 * 1024 / 8
        assert told <= weight.num_bytes <= 1.02 * told + 64


def test_idle_threads_use_no_cpu(bench: Bench, backend: CpuBackend) -> None:
    """After a replay the team spins briefly and then parks."""
    x = bench.output(2, 8)
    graph = backend.capture(lambda: [ops.add(backend, x, x, x) for _ in range(4)] and None, StepShape(2, 1, 0))
    backend.replay(graph, StepShape(2, 1, 0))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be kept on one core here")
def test_two_threads_on_one_core_are_not_slower_than_one() -> None:
    """Performance notes, section 1: contention is noticed and a core given back. Work is what lies between barriers."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # what the pool starts inherits it
    try:
        replays = [_chained_adds(threads) for threads in (1, 2)]
        best = [float("inf"), float("inf")]
        for round_ in range(30):
            for i, replay in enumerate(replays):
                start = time.perf_counter()
                replay()
                if round_ >= 15:  # the second team has had time to notice
                    best[i] = min(best[i], time.perf_counter() - start)
    finally:
        os.sched_setaffinity(0, allowed)
    assert best[1] < 1.5 * best[0] + 0.0005


def _chained_adds(threads: int) -> Callable[[], None]:
    """Replays 100 additions that depend on one another, half a millisecond on one thread."""
    try:
        backend = CpuBackend(threads=threads)
    except Unsupported as error:
        pytest.skip(str(error))
    bench = Bench(backend, BACKENDS["cpu"], np.random.default_rng(3))
    x, shape = bench.floats(np.ones((8, 4096))), StepShape(8, 1, 0)
    graph = backend.capture(lambda: [ops.add(backend, x, x, x) for _ in range(100)] and None, shape)
    return lambda: backend.replay(graph, shape)


def test_many_short_replays_with_pauses(bench: Bench, backend: CpuBackend) -> None:
    """Hot, yielding and parked threads alike pick up every region: a counter in memory misses no beat."""
    x, one = bench.floats(np.zeros((2, 2048))), bench.floats(np.ones((2, 2048)))
    graph = backend.capture(lambda: [ops.add(backend, x, one, x) for _ in range(5)] and None, StepShape(2, 1, 0))
    for i in range(400):
        backend.replay(graph, StepShape(2, 1, 0))
        if i % 100 == 0:
            time.sleep(0.002)
    assert (bench.read(x) == 2000).all()


def test_memory_is_aligned_and_large_blocks_are_mapped(backend: CpuBackend) -> None:
    """Buffers begin at 64 bytes; from one huge page on, at a huge page."""
    for shape, alignment in (((3, 5), 64), ((1 << 20,), 2 << 20)):
        buffer = backend.alloc(shape, DType.F32, Extent.FIXED)
        assert isinstance(buffer.storage, np.ndarray)
        assert buffer.storage.ctypes.data % alignment == 0
        backend.free(buffer)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_matrices_below_a_huge_page_share_huge_pages(backend: CpuBackend) -> None:
    """Pieces are zeroed, do not overlap, and their memory is the system's again as soon as each is freed."""
    shape = (300, 511)  # 599 KiB

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    for _ in range(2):
        pieces = [backend.alloc(shape, DType.F32, Extent.FIXED) for _ in range(60)]
        arrays = [piece.storage for piece in pieces]
        for i, array in enumerate(arrays):
            assert isinstance(array, np.ndarray)
            assert not array.any()
            array[:] = i + 1
        assert all((array == i + 1).all() for i, array in enumerate(arrays))
        for piece in pieces[:-1]:
            backend.free(piece)
        assert resident() - before < 8 << 20
        backend.free(pieces[-1])


def test_scratch_counts_against_the_limit() -> None:
    """B-42: what ops need beside their operands is part of what is used."""
    entry = BACKENDS["cpu"]
    limited = Bench(create_or_skip(entry, 64 << 20), entry, np.random.default_rng(0))
    before = limited.backend.device_facts().free_bytes
    cache = limited.backend.alloc_kv(1, 1, 64, 64, DType.F16)
    out = limited.output(1, 64)
    after = limited.backend.device_facts().free_bytes
    limited.step(1)
    ops.attention(
        limited.backend,
        limited.floats(np.zeros((1, 64))),
        cache,
        limited.ints([0]),
        limited.ints([0, 1], Extent.FIXED),
        limited.ints([[0]], Extent.SEQS),
        out,
        scale=1.0,
    )
    assert before > after > limited.backend.device_facts().free_bytes + 4096
    limited.backend.close()


def test_scratch_beyond_the_limit_is_refused() -> None:
    """B-42: a step that needs more scratch than is left is a CapacityExceeded with numbers, before it runs."""
    entry = BACKENDS["cpu"]
    limited = Bench(create_or_skip(entry, 1 << 20), entry, np.random.default_rng(0))
    weight, _, _ = limited.weight((GgmlType.Q8_0, 16), cols=512)
    limited.step(200)
    x, out = limited.floats(np.zeros((200, 512))), limited.output(200, 16)
    limited.backend.alloc((limited.backend.device_facts().free_bytes // 4 - 16,), DType.F32)
    with pytest.raises(CapacityExceeded, match="scratch of the CPU ops needs"):
        ops.linear(limited.backend, x, weight, out)
    limited.backend.close()
