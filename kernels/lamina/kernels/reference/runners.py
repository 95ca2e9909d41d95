"""From the operands of a launch to the function that computes it: one small runner per op.

Owns the table RUNNERS. Knows the reference's storage; holds no state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.buffer import BLOCK_TOKENS, Buffer, KvCache, StepShape, Weight
from lamina.kernels.ops import Args, LaunchError
from lamina.kernels.reference import attention, functions, sampling
from lamina.kernels.reference.storage import Matrix, require_within, rows_of, storage_of

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments of one launch, with the number of rows it acts on."""

    op: str
    args: Args
    num_rows: int
    shape: StepShape

    def floats(self, name: str, num_rows: int | None = None) -> F32:
        """The first rows of a float buffer, as a view [rows, columns] or [rows]."""
        return rows_of(self._get(name, Buffer), self.num_rows if num_rows is None else num_rows).view(np.float32)

    def ints(self, name: str, num_rows: int | None = None) -> I32:
        """The first rows of an i32 buffer, as a view."""
        return rows_of(self._get(name, Buffer), self.num_rows if num_rows is None else num_rows).view(np.int32)

    def table_of_ints(self, name: str) -> I32:
        """The first rows of an i32 buffer as [rows, columns], also where it has one column."""
        return self.ints(name).reshape(self.num_rows, -1)

    def whole(self, name: str) -> F32:
        """All rows of a float buffer."""
        return self.floats(name, self._get(name, Buffer).shape[0])

    def weight(self, name: str) -> Weight:
        return self._get(name, Weight)

    def matrix(self, name: str) -> Matrix:
        return storage_of(self.weight(name), Matrix)

    def cache(self) -> KvCache:
        return self._get("cache", KvCache)

    def number(self, name: str) -> float:
        return self._get(name, float)

    def integer(self, name: str) -> int:
        return self._get(name, int)

    def text(self, name: str) -> str:
        return self._get(name, str)

    def _get(self, name: str, kind: type[T]) -> T:
        value = self.args[name]
        if not isinstance(value, kind):
            raise LaunchError(f"{self.op}: {name} must be {kind.__name__}, not {type(value).__name__}")
        return value


def _embed(o: Operands) -> None:
    table, tokens = o.matrix("table").values, o.ints("tokens")
    require_within("embed: tokens", tokens, len(table))
    o.floats("out")[...] = table[tokens] * np.float32(o.number("scale"))


def _rms_norm(o: Operands) -> None:
    o.floats("out")[...] = functions.rms_norm(o.floats("x"), o.whole("weight"), o.number("eps"))


def _linear(o: Operands) -> None:
    matrix, out = o.matrix("weight"), o.floats("out")
    product = functions.linear(o.floats("x"), matrix.values, matrix.bias)
    if o.args["accumulate"]:
        out += product
    else:
        out[...] = product


def _gated_linear(o: Operands) -> None:
    matrix, out = o.matrix("weight"), o.floats("out")
    both = functions.linear(o.floats("x"), matrix.values, matrix.bias)
    gate, up = both[:, : out.shape[1]], both[:, out.shape[1] :]
    out[...] = functions.gate(gate, up, o.text("activation"))


def _route(o: Operands) -> None:
    experts, shares = o.table_of_ints("experts"), o.floats("shares").reshape(o.num_rows, -1)
    found = functions.route(
        o.floats("x"), experts.shape[1], o.text("gating"), bool(o.args["normalise"]), o.number("scale")
    )
    experts[...], shares[...] = found


def _expert_gated_linear(o: Operands) -> None:
    x, experts, out = o.floats("x"), o.table_of_ints("experts"), o.floats("out")
    for expert, rows, ranks in _chosen(o, experts, parts_each=2):
        both = functions.linear(x[rows], expert.values, expert.bias)
        half = both.shape[1] // 2
        by_rank = out.reshape(o.num_rows, experts.shape[1], half)
        by_rank[rows, ranks] = functions.gate(both[:, :half], both[:, half:], o.text("activation"))


def _expert_linear(o: Operands) -> None:
    experts, out = o.table_of_ints("experts"), o.floats("out")
    x = o.floats("x").reshape(o.num_rows, experts.shape[1], -1)
    shares = o.floats("shares").reshape(experts.shape)
    if not o.args["accumulate"]:
        out[...] = 0
    for expert, rows, ranks in _chosen(o, experts, parts_each=1):
        out[rows] += shares[rows, ranks, None] * functions.linear(x[rows, ranks], expert.values, expert.bias)


def _chosen(
    o: Operands, experts: I32, *, parts_each: int
) -> Iterator[tuple[Matrix, NDArray[np.intp], NDArray[np.intp]]]:
    """Each expert that a row chose, by id: its matrix, the rows, and the rank that it has in each."""
    weight, matrix = o.weight("weight"), o.matrix("weight")
    num_experts = len(weight.part_rows) // parts_each
    require_within(f"{o.op}: experts", experts, num_experts)
    size = weight.out_features // num_experts
    for expert in np.unique(experts):
        part = slice(expert * size, (expert + 1) * size)
        rows, ranks = np.nonzero(experts == expert)
        bias = None if matrix.bias is None else matrix.bias[part]
        yield Matrix(matrix.values[part], bias), rows, ranks


def _rope(o: Operands) -> None:
    functions.rope(
        o.floats("x"),
        o.ints("positions"),
        o.whole("inv_freq"),
        o.integer("head_dim"),
        o.text("layout"),
        o.number("magnitude"),
    )


def _kv_write(o: Operands) -> None:
    cache, slots = o.cache(), o.ints("slots")
    require_within("kv_write: slots", slots, cache.num_blocks * BLOCK_TOKENS)
    k, v = (o.floats(name).reshape(o.num_rows, cache.num_kv_heads, -1) for name in ("k", "v"))
    storage_of(cache, attention.Pages).write(k, v, slots)


def _attention(o: Operands) -> None:
    cache, out = o.cache(), o.floats("out")
    positions, row_starts = o.ints("positions"), o.ints("row_starts", o.shape.num_seqs + 1)
    block_table = o.ints("block_table", o.shape.num_seqs)
    require_within("attention: positions", positions, block_table.shape[1] * BLOCK_TOKENS)
    require_within("attention: row_starts", row_starts, o.num_rows + 1)
    require_within("attention: rows of a sequence", np.diff(row_starts), o.num_rows + 1)
    rule = attention.ScoreRule(
        o.number("scale"),
        o.integer("window"),
        o.number("softcap"),
        None if o.args["sinks"] is None else o.whole("sinks"),
    )
    mixed = attention.attend(
        o.floats("q").reshape(o.num_rows, -1, cache.key_dim),
        storage_of(cache, attention.Pages),
        positions,
        row_starts,
        block_table,
        rule,
        cache.value_dim,
    )
    out[...] = mixed.reshape(out.shape)


def _add(o: Operands) -> None:
    np.add(o.floats("x"), o.floats("y"), out=o.floats("out"))


def _softcap(o: Operands) -> None:
    x = o.floats("x")
    x[...] = functions.softcap(x, o.number("cap"))


def _gather_rows(o: Operands) -> None:
    x, indices = o.whole("x"), o.ints("indices")
    require_within("gather_rows: indices", indices, len(x))
    o.floats("out")[...] = x[indices]


def _argmax(o: Operands) -> None:
    o.ints("out")[...] = functions.argmax(o.floats("x"))


def _sample(o: Operands) -> None:
    out = o.ints("out")
    require_within("sample: out", out + 1, o.floats("x").shape[1] + 1)
    for row, (logits, params) in enumerate(zip(o.floats("x"), o.floats("params"), strict=True)):
        temperature, top_k, top_p, min_p, top_n_sigma, uniform = (float(value) for value in params)
        if out[row] >= 0 and temperature > 0:
            filters = sampling.Filters(temperature, int(top_k), top_p, min_p, top_n_sigma)
            out[row] = sampling.draw(logits, filters, uniform)


RUNNERS: Mapping[str, Callable[[Operands], None]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "route": _route,
    "expert_gated_linear": _expert_gated_linear,
    "expert_linear": _expert_linear,
    "rope": _rope,
    "kv_write": _kv_write,
    "attention": _attention,
    "add": _add,
    "softcap": _softcap,
    "gather_rows": _gather_rows,
    "argmax": _argmax,
    "sample": _sample,
}
