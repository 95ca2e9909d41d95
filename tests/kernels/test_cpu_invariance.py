"""The CPU backend's promise: a token's result is the same, bit for bit, whatever its company, chunking and threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType, Extent, StepShape, Weight
from lamina.spec.errors import InvalidPlan
from lamina.spec.quant import GgmlType
from support.backends import BACKENDS, Bench
from support.mini_stage import MiniStage, Piece
from support.paged import Heads, PagedSequences

Floats = NDArray[np.float32]
KV_DTYPES = [DType.F32, DType.F16, DType.BF16, DType.Q8_0]
BLOCKS = {0: [7, 0], 1: [11, 2], 2: [19, 4, 13]}
HISTORY = [Piece(0, [(7 * i) % 50 for i in range(20)], BLOCKS[0])], [Piece(0, list(range(24)), BLOCKS[2])]
TOKEN = Piece(20, [9], BLOCKS[0])
COMPANY = [
    [TOKEN],
    [Piece(0, [5, 9, 2, 44], BLOCKS[1]), TOKEN],
    [TOKEN, Piece(24, [6, 1, 3, 3, 8, 40, 2], BLOCKS[2]), Piece(0, [8], BLOCKS[1])],
]


def working_isas() -> list[str]:
    """Names of the instruction sets that run here; none where the library is not built."""
    from lamina.kernels.cpu.library import working_isas as find

    try:
        return [isa.name.lower() for isa in find()]
    except Unsupported:
        return []


every_isa = pytest.mark.parametrize("isa", working_isas())


@contextmanager
def native_bench(threads: int, isa: str | None = None) -> Iterator[Bench]:
    """A bench on a CpuBackend of so many threads, closed afterwards; equal seeds give equal weights."""
    from lamina.kernels.cpu.backend import CpuBackend

    backend = CpuBackend(threads=threads, isa=isa)
    try:
        yield Bench(backend, BACKENDS["cpu"], np.random.default_rng(5))
    finally:
        backend.close()


@every_isa
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_token_does_not_depend_on_its_company(isa: str, threads: int) -> None:
    """A-31, design 9: hidden state and logits of one token in three batches, eager and replayed, equal to the bit."""
    found: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
    with native_bench(threads, isa) as bench:
        stage = MiniStage(bench)
        graph = bench.backend.capture(stage.launch_all, StepShape(1, 1, 1))
        for history in HISTORY:
            bench.backend.replay(graph, stage.stage_inputs(history, []))
        for pieces in COMPANY:
            row = [i for i, piece in enumerate(pieces) for _ in piece.tokens].index(pieces.index(TOKEN))
            shape = stage.stage_inputs(pieces, [row])
            bench.backend.set_shape(shape)
            stage.launch_all()
            eager = stage.results(shape)
            bench.backend.replay(graph, shape)
            replayed = stage.results(shape)
            assert np.array_equal(eager[0], replayed[0])
            found.append((replayed[0][row], replayed[1][0]))
    assert all(np.array_equal(hidden, found[0][0]) for hidden, _ in found)
    assert all(np.array_equal(logits, found[0][1]) for _, logits in found)
    assert np.abs(found[0][1]).max() > 0


@every_isa
def test_a_prompt_does_not_depend_on_its_chunks(isa: str) -> None:
    """A-31: hidden state and logits of its last token, however a scheduler cuts it, equal to the bit."""
    prompt = [(7 * i) % 50 for i in range(24)]
    found: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
    for sizes in ([24], [16, 8], [12, 12], [13, 10, 1], [1] * 24):
        with native_bench(2, isa) as bench:
            stage = MiniStage(bench)
            start = 0
            for size in sizes:
                piece = Piece(start, prompt[start : start + size], BLOCKS[2])
                shape = stage.stage_inputs([piece], [size - 1])
                bench.backend.set_shape(shape)
                stage.launch_all()
                start += size
            hidden, logits, _ = stage.results(shape)
            found.append((hidden[-1], logits[-1]))
    assert all(np.array_equal(hidden, found[0][0]) for hidden, _ in found)
    assert all(np.array_equal(logits, found[0][1]) for _, logits in found)
    assert np.abs(found[0][1]).max() > 0


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64, 64), Heads(4, 1, 32, 32)], ids=["gqa3", "mqa"])
def test_attention_over_a_long_context_is_exact_at_every_split(dtype: DType, heads: Heads) -> None:
    """Context 1300, so that one token's keys are shared out among threads (or not): equal bits for 1, 2 and 4 threads,

    alone, in a chunk of 3, and in a prefill of 70 rows beside another sequence; and close to float64.
    """
    length = 1300
    results: list[NDArray[np.float32]] = []
    for threads in (1, 2, 4):
        with native_bench(threads) as bench:
            paged = PagedSequences(bench, heads, [length, 40], dtype)
            paged.write_all()
            q = bench.normal(70, heads.num_heads, heads.key_dim)
            company = bench.normal(40, heads.num_heads, heads.key_dim)
            scale = heads.key_dim**-0.5
            alone = paged.attend(q[-1:], [(0, length - 1, length)], scale=scale)
            chunk = paged.attend(q[-3:], [(0, length - 3, length)], scale=scale)
            both = np.concatenate([company, q])
            prefill = paged.attend(both, [(1, 0, 40), (0, length - 70, length)], scale=scale)
            assert np.array_equal(chunk[-1], alone[0])
            assert np.array_equal(prefill[-1], alone[0])
            assert np.array_equal(prefill[-3:], chunk)
            bench.assert_close("attention", alone, paged.expected(q[-1:], [(0, length - 1, length)], scale=scale))
            results.append(prefill)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@every_isa
@pytest.mark.parametrize("rule", [{"window": 600}, {"window": 5}, {"softcap": 8.0}, {"window": 530, "softcap": 3.0}])
def test_rules_over_a_long_context(isa: str, rule: dict[str, float]) -> None:
    """Windows that begin within a split, and softcap: decode equals prefill to the bit, both close to float64."""
    heads, length = Heads(6, 2, 32, 48), 1100
    with native_bench(2, isa) as bench:
        paged = PagedSequences(bench, heads, [length], DType.F16)
        paged.write_all()
        q = bench.normal(33, 6, 32, scale=2.0)
        sinks = bench.normal(6)
        where = [(0, length - 33, length)]
        prefill = paged.attend(q, where, scale=0.2, sinks=sinks, **rule)  # type: ignore[arg-type]
        decode = paged.attend(q[-1:], [(0, length - 1, length)], scale=0.2, sinks=sinks, **rule)  # type: ignore[arg-type]
        assert np.array_equal(decode[0], prefill[-1])
        wanted = paged.expected(q, where, scale=0.2, sinks=sinks, **rule)  # type: ignore[arg-type]
        bench.assert_close("attention", prefill, wanted)


def test_a_spoiled_sequence_harms_no_other() -> None:
    """Design 9: NaN in one sequence's queries, and in stale memory of blocks, stays out of other rows."""
    heads = Heads(4, 2, 32, 32)
    with native_bench(2) as bench:
        paged = PagedSequences(bench, heads, [40, 20], DType.F32)
        nothing = np.full((16, 64), np.nan, np.float32)
        for block in range(paged.num_blocks):
            paged._write(nothing, nothing, np.arange(16) + 16 * block)
        paged.write_all()
        q = bench.normal(4, 4, 32)
        q[0] = np.nan
        pieces = [(0, 37, 40), (1, 19, 20)]
        found = paged.attend(q, pieces, scale=0.2)
        assert np.isnan(found[0]).all()
        q[0] = 0
        bench.assert_close("attention", found[1:], paged.expected(q, pieces, scale=0.2)[1:])


def mixture(bench: Bench, gate_up: Weight, down: Weight, arrays: tuple[Floats, Floats, Floats], rows: slice) -> Floats:
    """3 experts a row on some rows of x, router logits and what the result is added to."""
    x, logits, out = (bench.floats(values[rows]) for values in arrays)
    count = x.shape[0]
    experts, shares = bench.ints(np.zeros((count, 3))), bench.floats(np.zeros((count, 3)))
    hidden = bench.output(count, 3 * gate_up.part_rows[0])
    bench.step(count)
    ops.route(bench.backend, logits, experts, shares, gating="softmax", normalise=True)
    ops.expert_gated_linear(bench.backend, x, experts, gate_up, hidden, "silu")
    ops.expert_linear(bench.backend, hidden, experts, shares, down, out, accumulate=True)
    return bench.read(out).view(np.float32)


@every_isa
@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.MXFP4, GgmlType.F16], ids=lambda k: k.name)
def test_experts_do_not_depend_on_company(isa: str, kind: GgmlType) -> None:
    """A-31: routed through 6 experts, 150 rows at once give each row the bits that it gets alone and among 7 others,

    for 1, 2 and 5 threads; experts have 100 and 256 outputs, so that threads share one and a last tile is not full.
    """
    results = []
    for threads in (1, 2, 5):
        with native_bench(threads, isa) as bench:
            gate_up = bench.weight(*[(kind, 256)] * 12, cols=256, bias=True)[0]
            down = bench.weight(*[(kind, 100)] * 6, cols=256, bias=True)[0]
            x, logits, before = bench.normal(150, 256), bench.normal(150, 6, scale=2.0), bench.normal(150, 100)

            arrays = (x, logits, before)
            together = mixture(bench, gate_up, down, arrays, slice(0, 150))
            for rows in (slice(0, 1), slice(1, 2), slice(77, 78), slice(70, 78), slice(149, 150)):
                assert np.array_equal(mixture(bench, gate_up, down, arrays, rows), together[rows])
            results.append(together)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_an_expert_that_does_not_exist_ends_the_step() -> None:
    """An id outside the weight is refused, not followed."""
    with native_bench(2) as bench:
        down = bench.weight(*[(GgmlType.Q8_0, 32)] * 4, cols=32)[0]
        x, out, shares = bench.output(3, 64), bench.output(3, 32), bench.floats(np.ones((3, 2)))
        bench.step(3)
        for bad in (4, -1):
            experts = bench.ints([[0, 1], [1, bad], [2, 3]])
            with pytest.raises(InvalidPlan, match="an id is outside"):
                ops.expert_linear(bench.backend, x, experts, shares, down, out)


@every_isa
def test_every_number_of_queries_per_kv_head(isa: str) -> None:
    """Groups of 1 to 9 and of 40 query heads: whole registers, remainders, and more than one tile holds."""
    with native_bench(2, isa) as bench:
        for group in (1, 2, 3, 4, 5, 7, 8, 9, 40):
            heads = Heads(2 * group, 2, 32, 32)
            paged = PagedSequences(bench, heads, [150], DType.F16)
            paged.write_all()
            q = bench.normal(5, 2 * group, 32)
            where = [(0, 145, 150)]
            bench.assert_close("attention", paged.attend(q, where, scale=0.2), paged.expected(q, where, scale=0.2))


@every_isa
@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 8), (80, 80), (192, 128), (256, 256)])
def test_head_sizes_that_fill_no_vector(isa: str, key_dim: int, value_dim: int) -> None:
    """B-16: any head size of float caches; V is padded inside the block and nowhere else."""
    heads = Heads(2, 1, key_dim, value_dim)
    with native_bench(1, isa) as bench:
        paged = PagedSequences(bench, heads, [37], DType.BF16)
        paged.write_all()
        q = bench.normal(3, 2, key_dim)
        where = [(0, 34, 37)]
        found = paged.attend(q, where, scale=0.1, view=True)
        bench.assert_close("attention", found, paged.expected(q, where, scale=0.1))
        k, v = bench.backend.read_kv(paged.cache, paged.blocks[0].tolist(), 37)
        assert k.shape == (37, 1, key_dim)
        assert v.shape == (37, 1, value_dim)


@every_isa
def test_softcap_is_accurate_near_zero_and_far_from_it(isa: str) -> None:
    """tanh to a relative 4e-7 of every value, 1e-6 to 30 times the cap, both signs, columns no multiple of 16."""
    with native_bench(1, isa) as bench:
        values = np.geomspace(1e-6, 30.0, 1501, dtype=np.float32)
        x = np.stack([values, -values])
        buffer = bench.floats(x)
        bench.step(2)
        ops.softcap(bench.backend, buffer, 1.0)
        wanted = np.tanh(x.astype(np.float64))
        assert np.max(np.abs(bench.read(buffer) / wanted - 1)) < 4e-7


@every_isa
def test_exponential_is_accurate_over_its_range(isa: str) -> None:
    """One key and one sink of 0 make attention 1 / (1 + e^-score): each to a relative 4e-7 from score -87 to 87."""
    with native_bench(1, isa) as bench:
        scores = np.linspace(-87, 87, 2001, dtype=np.float32)
        cache = bench.backend.alloc_kv(1, 1, 1, 1, DType.F32)
        bench.step(1)
        one = bench.floats(np.ones((1, 1)))
        ops.kv_write(bench.backend, one, one, bench.ints([0]), cache)
        out = bench.output(len(scores), 1)
        bench.step(len(scores))
        ops.attention(
            bench.backend,
            bench.floats(scores[:, None]),
            cache,
            bench.ints(np.zeros(len(scores))),
            bench.ints([0, len(scores)], Extent.FIXED),
            bench.ints([[0]], Extent.SEQS),
            out,
            scale=1.0,
            sinks=bench.vector([0.0]),
        )
        wanted = 1 / (1 + np.exp(-scores.astype(np.float64)))
        assert np.max(np.abs(bench.read(out)[:, 0] / wanted - 1)) < 4e-7
