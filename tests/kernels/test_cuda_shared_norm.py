"""Norms of a recording that the products around them do (shared_norm.py): as one by one, but for the launches."""

import numpy as np
import pytest
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.buffer import StepShape
from lamina.spec.quant import GgmlType
from support import op_oracle
from support.cuda_bench import emulated_bench, functions_of

INNER = 256
EPS = 1e-5


class Layers:
    """Two times: a product added to the row x, a norm of x, a product of that. In `results`, and x itself."""

    def __init__(self, hidden: int, kinds: tuple[GgmlType, ...], *, rows: int = 1, in_place: bool = False) -> None:
        bench = self.bench = emulated_bench()
        into, *readers = kinds
        back = [bench.weight((into, hidden), cols=INNER, bias=i == 0) for i in range(2)]
        self.out, self.readers, _ = bench.weight(*((kind, 48) for kind in readers), cols=hidden)
        self.back, self.tensors, self.biases = zip(*back, strict=True)
        self.start, self.values = bench.normal(rows, hidden), [bench.normal(rows, INNER) for _ in range(2)]
        self.gains = [1 + bench.normal(hidden, scale=0.3) for _ in range(2)]
        self.x, self.inner = bench.floats(self.start), [bench.floats(values) for values in self.values]
        self.normed = self.x if in_place else bench.output(rows, hidden)
        self.results = [bench.output(rows, 48 * len(readers)) for _ in range(2)]
        self.weights = [bench.vector(gain) for gain in self.gains]
        self.other = bench.output(rows, hidden)
        self.shape = StepShape(rows, 1, 0)

    def launch(self, *, adds: bool = False, again: bool = False) -> None:
        backend = self.bench.backend
        for inner, back, gain, result in zip(self.inner, self.back, self.weights, self.results, strict=True):
            ops.linear(backend, inner, back, self.x, accumulate=True)
            ops.rms_norm(backend, self.x, gain, self.normed, EPS)
            ops.linear(backend, self.normed, self.out, result)
            if again:
                ops.linear(backend, inner, back, self.other)
                ops.linear(backend, self.normed, self.out, result)
            if adds:
                ops.add(backend, self.normed, self.normed, self.other)

    def run(self, *, recorded: bool, adds: bool = False, again: bool = False) -> tuple[list[NDArray[np.generic]], int]:
        """What is left in every buffer, and how many norms were launched."""
        backend, before = self.bench.backend, len(functions_of(self.bench))
        backend.upload(self.x, self.start)
        if recorded:
            graph = backend.capture(lambda: self.launch(adds=adds, again=again), self.shape)
            backend.replay(graph, self.shape)
        else:
            self.bench.step(self.shape.num_rows)
            self.launch(adds=adds, again=again)
        left = [self.bench.read(buffer) for buffer in (self.x, self.normed, *self.results)]
        return left, functions_of(self.bench)[before:].count("rms_norm")

    def wanted(self) -> list[NDArray[np.float64]]:
        x = self.start.astype(np.float64)
        results = []
        for values, tensors, bias, gain in zip(self.values, self.tensors, self.biases, self.gains, strict=True):
            x = x + values @ op_oracle.decoded(*tensors).T + (0 if bias is None else bias)
            normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * gain
            results.append(normed @ op_oracle.decoded(*self.readers).T)
        return results


K, Q6, Q8, Q5 = GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.Q8_0, GgmlType.Q5_1


@pytest.mark.parametrize(
    ("hidden", "kinds"), [(512, (K, K, Q6)), (256, (Q6, Q5)), (192, (Q8, Q8)), (4160, (K, Q8))], ids=str
)
def test_a_shared_norm_changes_no_bit(hidden: int, kinds: tuple[GgmlType, ...]) -> None:
    """C-13: the first norm, which nobody else wants, has no launch; what the last gives is left in its buffer."""
    layers = Layers(hidden, kinds)
    alone, num_alone = layers.run(recorded=False)
    recorded, num_recorded = layers.run(recorded=True)
    assert (num_alone, num_recorded) == (2, 1)
    for one, other in zip(alone, recorded, strict=True):
        assert np.array_equal(one, other)
    for found, wanted in zip(recorded[2:], layers.wanted(), strict=True):
        layers.bench.assert_close("linear", found, wanted)


@pytest.mark.parametrize(
    ("hidden", "kinds", "options"),
    [
        (256, (K, GgmlType.F16), {}),
        (256, (K, K, GgmlType.F16), {}),
        (512, (K, GgmlType.Q2_K), {}),
        (512, (GgmlType.Q2_K, K), {}),
        (96, (Q8, Q8), {}),
        (512, (K, K), {"rows": 2}),
        (512, (K, K), {"in_place": True}),
        (512, (K, K), {"adds": True}),
        (512, (K, K), {"again": True}),
    ],
    ids=[
        *("float", "partly-float", "Q2_K", "of-Q2_K", "part-of-a-chunk", "two-rows", "in-place", "read-by-others"),
        "read-after-others",
    ],
)
def test_a_norm_that_others_need_is_launched(
    hidden: int, kinds: tuple[GgmlType, ...], options: dict[str, bool | int]
) -> None:
    launched = {name: bool(options.get(name)) for name in ("adds", "again")}
    made = {name: value for name, value in options.items() if name not in launched}
    layers = Layers(hidden, kinds, **made)  # type: ignore[arg-type]
    alone, num_alone = layers.run(recorded=False, **launched)
    recorded, num_recorded = layers.run(recorded=True, **launched)
    assert (num_alone, num_recorded) == (2, 2)
    for one, other in zip(alone, recorded, strict=True):
        assert np.array_equal(one, other)
