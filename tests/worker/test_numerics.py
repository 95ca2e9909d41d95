"""In which dtype a stage multiplies, and what happens when f16 is too narrow (A-01, A-02, A-05 to A-08)."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lamina.kernels.backend import Backend, Unsupported
from lamina.kernels.buffer import Buffer, DType, StepShape
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.cuda.policy import compute_dtypes
from lamina.kernels.ops import Args, OpSpec
from lamina.kernels.reference import ReferenceBackend
from lamina.kernels.reference.storage import rows_of
from lamina.rpc_worker.numerics import overflows_f16, resolve_compute
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.digest import model_digest
from lamina.spec.errors import CapacityExceeded, InvalidConfig
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import BLOCK_TOKENS, AddSequence, FinishReason, SeqSlice, StepPlan, Tokens
from support.backends import relative_error
from support.cuda_emulated import EmulatedDevice
from support.inprocess import InProcessModel
from support.overflow import write_f16_llama

SETTINGS = StageSettings(max_rows=96, max_seqs=2, max_logit_rows=2, max_context=128, kv_dtype="f32")
PROMPT = [(37 * i + 11) % 300 for i in range(20)]
OFFERS = {
    cc: tuple(dtype.value for dtype in compute_dtypes(cc)) for cc in ((6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (12, 0))
}


def test_the_dtype_of_every_generation() -> None:
    """A-01: bf16 where native, f16 on Volta and Turing, f32 on Pascal; auto never gives f16 to what overflows."""
    plain = {cc: resolve_compute("auto", offered, overflowing=False).value for cc, offered in OFFERS.items()}
    wide = {cc: resolve_compute("auto", offered, overflowing=True).value for cc, offered in OFFERS.items()}
    assert plain == {
        (6, 1): "f32",
        (7, 0): "f16",
        (7, 5): "f16",
        (8, 0): "bf16",
        (8, 9): "bf16",
        (12, 0): "bf16",
    }
    assert wide == {(6, 1): "f32", (7, 0): "f32", (7, 5): "f32", (8, 0): "bf16", (8, 9): "bf16", (12, 0): "bf16"}


@pytest.mark.parametrize("overflowing", [False, True])
@pytest.mark.parametrize("wish", ["f32", "f16", "bf16"])
def test_a_wish_is_obeyed_where_the_device_has_it(wish: str, overflowing: bool) -> None:
    """Elsewhere the device does what it would do by itself: one flag serves a CPU and two cards (A-07)."""
    for cc, offered in OFFERS.items():
        found = resolve_compute(wish, offered, overflowing=overflowing).value
        assert found == (wish if wish in offered else resolve_compute("auto", offered, overflowing=overflowing).value)
        assert (wish in offered) == (wish != "bf16" or cc >= (8, 0))
    assert resolve_compute(wish, ("f32",), overflowing=overflowing) is DType.F32
    with pytest.raises(InvalidConfig, match="--compute-dtype 'int8' is none of auto, f32, bf16, f16"):
        resolve_compute("int8", ("f32",), overflowing=overflowing)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_f16_llama(tmp_path_factory.mktemp("numerics") / "plain.gguf", overflowing=False)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_f16_llama(tmp_path_factory.mktemp("numerics") / "overflowing.gguf", overflowing=True)


def test_models_known_to_overflow(plain: Path) -> None:
    """A-01: Qwen2 from the 7B's width on, Gemma 3 and gpt-oss of any size; llama and small Qwen2 are not among them."""
    file = read_gguf(plain)
    spec = model_spec(file, model_digest(file))

    def known(architecture: str, hidden: int) -> bool:
        return overflows_f16(replace(spec, architecture=architecture, hidden=hidden))

    assert known("qwen2", 3584)
    assert known("qwen2", 8192)
    assert known("gemma3", 1152)
    assert known("gpt-oss", 2880)
    assert not known("qwen2", 2048)
    assert not known("llama", 8192)


class HalfRangeBackend(ReferenceBackend):
    """The reference with the range of f16, not its rounding: beyond `limit` a linear's input is infinite.

    So a run that never overflows, or was repaired, equals a float32 run to the last bit.
    """

    capabilities = replace(ReferenceBackend.capabilities, compute_dtype="f16", compute_dtypes=("f16", "f32"))

    def __init__(self) -> None:
        super().__init__()
        self.limit = 65504.0
        self.compute = DType.F16

    def set_compute(self, dtype: DType) -> None:
        super().set_compute(dtype)
        self.compute = dtype

    def _compute(self, op: OpSpec, args: Args, shape: StepShape, num_rows: int) -> None:
        x = args.get("x")
        if op.name not in ("linear", "gated_linear") or self.compute is DType.F32 or not isinstance(x, Buffer):
            super()._compute(op, args, shape, num_rows)
            return
        rows = rows_of(x, num_rows)
        kept = rows.copy()
        rows[np.abs(rows) > self.limit] = np.inf
        with np.errstate(invalid="ignore", over="ignore"):
            super()._compute(op, args, shape, num_rows)
        rows[...] = kept


class Pair:
    """A model on a backend under test and on the reference, fed the same tokens."""

    def __init__(self, path: Path, backend: HalfRangeBackend, cuts: tuple[int, ...] = ()) -> None:
        self.backend = backend
        self.tested = InProcessModel(path, backend, cuts, SETTINGS)
        self.exact = InProcessModel(path, ReferenceBackend(), cuts, SETTINGS)

    def step(self, tokens: list[int]) -> None:
        """Both run it; their logits are equal to the last bit."""
        wanted = self.exact.step({0: tokens})
        assert np.isfinite(wanted).all()
        assert np.array_equal(self.tested.step({0: tokens}), wanted)

    def dtypes(self) -> list[str]:
        return [stage._precision.dtype.value for stage in self.tested.stages]

    def free(self) -> None:
        self.tested.free()
        self.exact.free()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Messages at WARNING or above, as they come."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("lamina").addHandler(handler)
    yield messages
    logging.getLogger("lamina").removeHandler(handler)


@pytest.mark.parametrize("cuts", [(), (2,)], ids=["whole", "split"])
def test_f16_that_overflows_is_widened(overflowing: Path, warnings: list[str], cuts: tuple[int, ...]) -> None:
    """A-02, A-08: one warning names model, layer, device and both dtypes; every token is what float32 gives.

    Only the stage whose layer overflows falls back.
    """
    pair = Pair(overflowing, HalfRangeBackend(), cuts)
    assert pair.dtypes() == ["f16"] * (1 + len(cuts))
    pair.step(PROMPT)
    for token in PROMPT[:6]:
        pair.step([token])
    assert len(warnings) == 1
    for part in ("tiny-llama-F16", "layer 1:", "(numpy)", "exceed f16", "in f32"):
        assert part in warnings[0]
    assert pair.dtypes() == ["f32", "f16"][: 1 + len(cuts)]
    pair.free()


def test_a_model_of_ordinary_values_stays_in_f16(plain: Path, warnings: list[str]) -> None:
    """A-06: no false alarm."""
    pair = Pair(plain, HalfRangeBackend())
    pair.step(PROMPT)
    for token in PROMPT[:6]:
        pair.step([token])
    assert (pair.dtypes(), warnings) == (["f16"], [])
    pair.free()


@pytest.mark.parametrize("at_step", [0, 1, 5])
def test_an_overflow_in_mid_run_leaves_no_trace(plain: Path, warnings: list[str], at_step: int) -> None:
    """A-08: the step that overflows is run again over the good keys and values before it; a chunk without logits, too,
    is watched."""
    backend = HalfRangeBackend()
    pair = Pair(plain, backend)
    for step, tokens in enumerate([PROMPT, [5], [6, 7, 8], [9], [10], [11, 12], [13], [14]]):
        backend.limit = 1e-3 if step == at_step else 65504.0
        pair.step(tokens)
    assert len(warnings) == 1
    assert pair.dtypes() == ["f32"]
    pair.free()


def test_what_a_wider_dtype_does_not_cure_is_no_reason_to_fall_back(plain: Path, warnings: list[str]) -> None:
    """A-05: NaN of a damaged weight or an earlier stage is the sequence's error, and the device keeps its dtype."""
    backend = HalfRangeBackend()
    model = InProcessModel(plain, backend, (), SETTINGS)
    matrix = model.stages[0]._weights.layers[1].ffn.down.storage
    matrix.values[0, 0] = np.nan
    assert np.isnan(model.step({0: PROMPT})).any()
    assert (warnings, model.stages[0]._precision.dtype.value) == ([], "f16")
    matrix.values[0, 0] = 0.0
    model.reset()
    assert np.isfinite(model.step({0: PROMPT})).all()
    assert backend.compute is DType.F16
    model.free()


def test_two_devices_decide_for_themselves(overflowing: Path, warnings: list[str]) -> None:
    """A-07: the device that holds the layer falls back, the other one stays."""
    file = read_gguf(overflowing)
    spec = model_spec(file, model_digest(file))
    backends = [HalfRangeBackend(), HalfRangeBackend()]
    model = InProcessModel(overflowing, backends[0], (2,), SETTINGS)
    second = Stage(backends[1], spec, LayerRange(2, 3), SETTINGS)
    second.load(file.tensors, lambda _: None)
    second.allocate_cache((SETTINGS.max_blocks_per_seq * SETTINGS.max_seqs,))
    model.stages[1].free()
    model.stages[1] = second
    assert np.isfinite(model.step({0: PROMPT})).all()
    assert [backend.compute for backend in backends] == [DType.F32, DType.F16]
    assert len(warnings) == 1
    model.free()


@pytest.mark.parametrize("overflows", [False, True])
def test_a_turing_card(plain: Path, overflowing: Path, warnings: list[str], overflows: bool) -> None:
    """A-02, A-06 with the real kernels: products of many rows in f16, and in f32 once they have overflowed."""
    backend = CudaBackend(device=EmulatedDevice((7, 5)))
    path = overflowing if overflows else plain
    tokens = [(37 * i + 11) % 300 for i in range(90)]  # more rows than the int8 kernels take
    wanted = InProcessModel(path, ReferenceBackend(), (), SETTINGS).step({0: tokens})
    model = InProcessModel(path, backend, (), SETTINGS)
    assert model.stages[0]._precision.dtype.value == "f16"
    assert relative_error(model.step({0: tokens}), wanted) < 5e-3
    assert len(warnings) == overflows
    assert model.stages[0]._precision.dtype.value == ("f32" if overflows else "f16")
    assert model.stages[0]._graphs.counts.held == 1 - overflows  # what was recorded in f16 is gone
    model.free()
    backend.close()


def test_a_device_refuses_what_it_cannot_compute_in() -> None:
    for backend, dtype in (
        (ReferenceBackend(), DType.F16),
        (CudaBackend(device=EmulatedDevice((7, 5))), DType.BF16),
    ):
        with pytest.raises(Unsupported, match=rf"computes in f.*, not in {dtype.value}"):
            backend.set_compute(dtype)


@pytest.mark.parametrize("make_backend", [ReferenceBackend, lambda: CudaBackend(device=EmulatedDevice())])
def test_who_shares_the_blocks_of_a_refused_step_ends_too(
    plain: Path, make_backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-04, A-05: sequence 1 was planned, on the blocks of 0's prompt, before anybody knew that they would be empty."""
    model = InProcessModel(plain, make_backend(), (), SETTINGS)
    stage, shared = model.stages[0], (BlockId(0), BlockId(1))
    prompt = tuple((PROMPT * 2)[: 2 * BLOCK_TOKENS])

    def raise_full(*_: object) -> None:
        raise CapacityExceeded("full")

    def ready(step: int, seq: int, pos: int, blocks: tuple[BlockId, ...], *ids: int) -> ReadyStep:
        piece = SeqSlice(SeqId(seq), pos, len(ids), Tokens(ids), (blocks,), len(ids) == 1)
        return ReadyStep(StepPlan(Epoch(1), StepId(step), (piece,)), np.array(ids, np.int32), None)

    stage.run(ready(0, 7, 0, shared, *reversed(prompt)))  # what the blocks held before
    stage.remove_sequence(SeqId(7))
    refused = ready(1, 0, 0, shared, *prompt)
    with monkeypatch.context() as full:
        full.setattr(stage._precision, "launch", raise_full)
        with pytest.raises(CapacityExceeded) as raised:
            stage.launch(refused)
    stage.finish(stage.refuse(refused, raised.value))
    for seq, step in ((1, 2), (2, 4)):
        stage.add_sequence(AddSequence(SeqId(seq), SamplingParams(), (*prompt, 5), frozenset(), 100))
        done = stage.run(ready(step, seq, len(prompt), (*shared, BlockId(2)), 5)).done
        assert done is not None
        assert (done.tokens[0].finish, done.tokens[0].error[:14]) == (
            (FinishReason.ERROR, "NumericalError") if seq == 1 else (None, "")
        )
        stage.run(ready(step + 1, seq + 10, 0, shared, *prompt))  # computed again, by somebody else: all is well
    model.free()
