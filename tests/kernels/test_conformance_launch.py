"""Launch arguments are checked before anything runs (B-05), and optional concerns say that they are absent (B-02)."""

from collections.abc import Callable

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import Buffer, DType, Extent
from lamina.kernels.ops import LaunchError
from lamina.spec.errors import InvalidPlan
from lamina.spec.quant import GgmlType
from support.backends import Bench


class Operands:
    """Well-formed operands of every op, for tests to spoil one at a time."""

    def __init__(self, bench: Bench) -> None:
        self.b = bench.backend
        self.x = bench.output(3, 64)
        self.y = bench.output(3, 64)
        self.narrow = bench.output(3, 48)
        self.halves = bench.backend.alloc((3, 64), DType.F16, Extent.ROWS)
        self.ints = bench.ints([0, 1, 2])
        self.starts = bench.ints([0, 3], Extent.FIXED)
        self.table = bench.ints([[0, 1]], Extent.SEQS)
        self.gain = bench.vector(np.ones(64))
        self.freq = bench.vector(np.ones(16))
        self.params = bench.floats(np.zeros((3, len(ops.SAMPLE_PARAMS))))
        self.sinks = bench.vector(np.ones(3))
        self.square = bench.weight((GgmlType.Q8_0, 64), cols=64)[0]
        self.pair = bench.weight((GgmlType.Q8_0, 64), (GgmlType.Q8_0, 64), cols=64)[0]
        self.uneven = bench.weight((GgmlType.Q8_0, 64), (GgmlType.Q8_0, 32), cols=64)[0]
        self.cache = bench.backend.alloc_kv(2, 2, 32, 32, DType.F32)
        bench.step(3)

    def attend(self, q: Buffer, out: Buffer, sinks: Buffer | None = None) -> None:
        ops.attention(self.b, q, self.cache, self.ints, self.starts, self.table, out, scale=1.0, window=0, sinks=sinks)


BAD_LAUNCHES: dict[str, Callable[[Operands], None]] = {
    "embed: out too narrow": lambda o: ops.embed(o.b, o.ints, o.square, o.narrow),
    "embed: float tokens": lambda o: ops.embed(o.b, o.x, o.square, o.x),
    "rms_norm: columns no multiple of the weight": lambda o: ops.rms_norm(o.b, o.narrow, o.gain, o.narrow, 1e-5),
    "rms_norm: out unlike x": lambda o: ops.rms_norm(o.b, o.x, o.gain, o.narrow, 1e-5),
    "rms_norm: f16 input": lambda o: ops.rms_norm(o.b, o.halves, o.gain, o.x, 1e-5),
    "linear: x too narrow": lambda o: ops.linear(o.b, o.narrow, o.square, o.y),
    "linear: out too narrow": lambda o: ops.linear(o.b, o.x, o.square, o.narrow),
    "linear: buffer for a weight": lambda o: ops.linear(o.b, o.x, o.gain, o.y),  # type: ignore[arg-type]
    "linear: int for a flag": lambda o: ops.linear(o.b, o.x, o.square, o.y, accumulate=1),  # type: ignore[arg-type]
    "gated_linear: one part": lambda o: ops.gated_linear(o.b, o.x, o.square, o.y, "silu"),
    "gated_linear: uneven parts": lambda o: ops.gated_linear(o.b, o.x, o.uneven, o.y, "silu"),
    "gated_linear: unknown activation": lambda o: ops.gated_linear(o.b, o.x, o.pair, o.y, "relu"),
    "gated_linear: out of both parts": lambda o: ops.gated_linear(o.b, o.x, o.pair, o.narrow, "silu"),
    "rope: unknown layout": lambda o: ops.rope(o.b, o.x, o.ints, o.freq, head_dim=32, layout="glm"),
    "rope: columns no multiple of head_dim": lambda o: ops.rope(o.b, o.x, o.ints, o.freq, head_dim=48, layout="neox"),
    "rope: more frequencies than pairs": lambda o: ops.rope(o.b, o.x, o.ints, o.gain, head_dim=32, layout="norm"),
    "kv_write: k too narrow": lambda o: ops.kv_write(o.b, o.narrow, o.x, o.ints, o.cache),
    "kv_write: v too narrow": lambda o: ops.kv_write(o.b, o.x, o.narrow, o.ints, o.cache),
    "attention: heads no multiple of KV heads": lambda o: o.attend(o.x.columns(0, 32), o.y.columns(0, 32)),
    "attention: out unlike heads": lambda o: o.attend(o.x, o.narrow),
    "attention: sinks unlike heads": lambda o: o.attend(o.x, o.y, o.sinks),
    "add: columns differ": lambda o: ops.add(o.b, o.x, o.narrow, o.x),
    "gather_rows: columns differ": lambda o: ops.gather_rows(o.b, o.x, o.ints, o.narrow),
    "gather_rows: float indices": lambda o: ops.gather_rows(o.b, o.x, o.x, o.y),
    "argmax: float out": lambda o: ops.argmax(o.b, o.x, o.y),
    "argmax: int input": lambda o: ops.argmax(o.b, o.ints, o.ints),
    "sample: a parameter too few": lambda o: ops.sample(o.b, o.x, o.params.columns(0, 5), o.ints),
    "sample: float out": lambda o: ops.sample(o.b, o.x, o.params, o.y),
    "missing argument": lambda o: o.b.launch(ops.ADD, {"x": o.x, "y": o.y}),
    "unknown argument": lambda o: o.b.launch(ops.ADD, {"x": o.x, "y": o.y, "out": o.x, "scale": 1.0}),
    "None where none may be": lambda o: o.b.launch(ops.ADD, {"x": o.x, "y": None, "out": o.x}),
    "int for a float": lambda o: o.b.launch(ops.SOFTCAP, {"x": o.x, "cap": 30}),
}


@pytest.mark.parametrize("spoiled", BAD_LAUNCHES, ids=lambda name: name.replace(" ", "_"))
def test_a_bad_launch_is_refused(bench: Bench, spoiled: str) -> None:
    """B-05: wrong arity, kind, dtype or shape is a LaunchError that names the op, and nothing was written."""
    operands = Operands(bench)
    before = [bench.read(buffer) for buffer in (operands.x, operands.y, operands.narrow)]
    with pytest.raises(LaunchError) as refusal:
        BAD_LAUNCHES[spoiled](operands)
    assert str(refusal.value).split(":")[0] in ops.ALL_OPS
    after = [bench.read(buffer) for buffer in (operands.x, operands.y, operands.narrow)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_good_launches_of_the_same_operands_pass(bench: Bench) -> None:
    """The operands that the negative cases spoil are sound as they are."""
    o = Operands(bench)
    ops.embed(o.b, o.ints, o.square, o.x)
    ops.rms_norm(o.b, o.x, o.gain, o.y, 1e-5)
    ops.linear(o.b, o.x, o.square, o.y, accumulate=True)
    ops.gated_linear(o.b, o.x, o.pair, o.y, "gelu_tanh")
    ops.rope(o.b, o.x, o.ints, o.freq, head_dim=32, layout="norm")
    ops.kv_write(o.b, o.x, o.x, o.ints, o.cache)
    o.attend(o.x, o.y)
    ops.add(o.b, o.x, o.y, o.x)
    ops.softcap(o.b, o.x, 30.0)
    ops.gather_rows(o.b, o.x, o.ints, o.y)
    ops.argmax(o.b, o.x, o.ints)
    ops.sample(o.b, o.x, o.params, o.ints)


def test_every_op_is_supported(bench: Bench) -> None:
    """A backend has every op of ALL_OPS, and says no to one that is not among them."""
    assert all(bench.backend.supports(op) for op in ops.ALL_OPS.values())
    assert not bench.backend.supports(ops.OpSpec("conv1d", {}))


def test_absent_concerns_are_reported(bench: Bench) -> None:
    """B-02: an optional method either works or raises Unsupported, as its capability flag says."""
    backend, able = bench.backend, bench.backend.capabilities
    for present, call in (
        (able.streams, backend.create_stream),
        (able.events, backend.create_event),
        (able.pinned_memory, lambda: backend.alloc_pinned(4096)),
    ):
        if present:
            assert call() is not None
        else:
            with pytest.raises(Unsupported, match=backend.name):
                call()
    backend.bind_to_thread()
    backend.synchronize()


def test_pinned_memory_is_zeroed(bench: Bench) -> None:
    """B-10: where there is pinned memory, it comes zeroed and of the size asked for."""
    if not bench.backend.capabilities.pinned_memory:
        pytest.skip("no pinned memory")
    pinned = bench.backend.alloc_pinned(5000)
    assert pinned.nbytes == 5000
    assert not pinned.any()


def test_device_facts_are_plausible(bench: Bench) -> None:
    """Kind, name, and no more free than there is."""
    facts = bench.backend.device_facts()
    assert facts.kind in ("cpu", "cuda", "mock")
    assert facts.name
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert DType.F32 in bench.backend.capabilities.kv_dtypes


def test_rows_beyond_a_buffer_are_refused_by_strict_backends(bench: Bench) -> None:
    """A step larger than the arena, or an operand freed or of another backend, is a LaunchError, not a crash."""
    if not bench.entry.strict:
        pytest.skip("checked by the backends that tests run on")
    x, y = bench.output(3, 8), bench.output(2, 8)
    bench.step(3)
    with pytest.raises(LaunchError, match="y has 2 rows, the step needs 3"):
        ops.add(bench.backend, x, y, x)
    bench.step(2)
    bench.backend.free(y)
    with pytest.raises(LaunchError, match="freed"):
        ops.add(bench.backend, x, y, x)
    other = bench.entry.create(None)
    foreign = other.alloc((3, 8), DType.F32, Extent.ROWS)
    with pytest.raises(LaunchError, match="another backend"):
        ops.add(bench.backend, x, foreign, x)


def _bad_step(o: Operands, what: str) -> None:
    """One launch whose arrays name something that does not exist."""
    b, upload = o.b, o.b.upload
    match what:
        case "token":
            upload(o.ints, np.array([0, 64, 1], np.int32))
            ops.embed(b, o.ints, o.square, o.x)
        case "slot":
            upload(o.ints, np.array([0, 31, -1], np.int32))
            ops.kv_write(b, o.x, o.x, o.ints, o.cache)
        case "row":
            upload(o.ints, np.array([0, 3, 1], np.int32))
            ops.gather_rows(b, o.x, o.ints, o.y)
        case "position":
            upload(o.ints, np.array([0, 1, 32], np.int32))
            o.attend(o.x, o.y)
        case "block":
            upload(o.table, np.array([[2, 0]], np.int32))
            o.attend(o.x, o.y)
        case "row start":
            upload(o.starts, np.array([2, 1], np.int32))
            o.attend(o.x, o.y)


@pytest.mark.parametrize("what", ["token", "slot", "row", "position", "block", "row start"])
def test_arrays_that_name_nothing_are_refused_by_strict_backends(computing: Bench, what: str) -> None:
    """A token, slot, row, position or block out of range is an InvalidPlan, never a wrapped or foreign read."""
    if not computing.entry.strict:
        pytest.skip("not checked on the device")
    operands = Operands(computing)
    with pytest.raises(InvalidPlan):
        _bad_step(operands, what)
