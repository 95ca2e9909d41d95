"""`rpc-worker --self-test`: a fixed prompt through every device, compared with the float32 reference (A-09).

Without a model, small random models of every tensor type with kernels; with one, as many of its leading layers as the
reference has room for. Runs by itself, in no daemon; each device is opened, tried and closed in turn.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from lamina.kernels.backend import Backend
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.models import OpenedModel, open_model
from lamina.rpc_worker.probe_model import EXPERT_TYPES, PROBE_TYPES, write_probe_model
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.digest import model_digest
from lamina.spec.errors import LaminaError
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.model import ExpertsFfn, LayerRange, ModelSpec
from lamina.spec.placement import StageSettings
from lamina.spec.quant import GgmlType
from lamina.spec.step import BLOCK_TOKENS, SeqSlice, StepPlan, Tokens

# A prompt as long as it takes to leave the kernels for few rows, a chunk after it, then single tokens.
_CHUNKS = (90, 5, 1, 1, 1)
_NUM_TOKENS = sum(_CHUNKS)
_NUM_BLOCKS = -(-_NUM_TOKENS // BLOCK_TOKENS)

# Relative error ||a - b|| / ||b|| of hidden states or logits. Kernels round activations to 8 bits and caches to 16,
# which leaves up to 4 % behind in one random layer and grows slowly with depth; a wrong layer is off by half and more.
TOLERANCE_PROBE = 0.05
TOLERANCE_MODEL = 0.1

Values = list[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One device with one model: the largest error of any step, or why there is none."""

    device: str
    kernel: str
    model: str
    max_error: float
    tolerance: float
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Whether the device can be trusted with the model."""
        return not self.failure and self.max_error <= self.tolerance


def run_self_test(
    devices: Mapping[str, Callable[[], Backend]], model_path: Path | None, compute: str = "auto"
) -> Iterator[Finding]:
    """Findings as they come, devices in order. Raises what opening the model raises."""
    with tempfile.TemporaryDirectory(prefix="lamina-self-test-") as folder:
        trials = list(_trials(model_path, Path(folder)))
        for name, create in devices.items():
            yield from _try_device(name, create, trials, compute)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What to run, and what the reference says to it."""

    name: str
    model: OpenedModel
    layers: LayerRange
    tolerance: float
    expected: Values


def _trials(model_path: Path | None, folder: Path) -> Iterator[_Trial]:
    if model_path is not None:
        file = read_gguf(model_path)
        model = open_model(model_path, model_digest(file))
        layers = _affordable_layers(model.spec, _budget_bytes())
        part = "" if layers == model.spec.all_layers else f", layers {layers}"
        yield _trial(f"{model.spec.name}{part}", model, layers, TOLERANCE_MODEL)
        return
    for kind in PROBE_TYPES:
        yield _probe_trial(kind, folder)
    for kind in EXPERT_TYPES:
        yield _probe_trial(kind, folder, experts=True)


def _probe_trial(kind: GgmlType, folder: Path, *, experts: bool = False) -> _Trial:
    name = f"random {kind.name}{' experts' if experts else ''}"
    path = folder / f"{name}.gguf"
    write_probe_model(path, kind, experts=experts)
    model = open_model(path, model_digest(read_gguf(path)))
    return _trial(name, model, model.spec.all_layers, TOLERANCE_PROBE)


def _trial(name: str, model: OpenedModel, layers: LayerRange, tolerance: float) -> _Trial:
    backend = ReferenceBackend()
    try:
        return _Trial(name, model, layers, tolerance, _run(backend, model, layers, "f32", "f32"))
    finally:
        backend.close()


def _budget_bytes() -> int:
    """What the reference may take of the host's memory."""
    return psutil.virtual_memory().available // 2


def _affordable_layers(spec: ModelSpec, num_bytes: int) -> LayerRange:
    """The leading layers whose weights fit as float32, at least one."""
    left = num_bytes - 4 * spec.vocab_size * spec.hidden
    for layer in spec.layers_of(spec.all_layers):
        attention = layer.attention
        width = attention.query_width + attention.key_width + attention.value_width + attention.output_width
        num_experts = layer.ffn.num_experts if isinstance(layer.ffn, ExpertsFfn) else 1
        left -= 4 * spec.hidden * (width + 3 * num_experts * layer.ffn.intermediate)
        if left < 0:
            return LayerRange(0, max(1, layer.index))
    return spec.all_layers


def _try_device(name: str, create: Callable[[], Backend], trials: list[_Trial], compute: str) -> Iterator[Finding]:
    try:
        backend = create()
    except (LaminaError, ImportError) as error:
        yield Finding(name, "", "", float("inf"), 0.0, str(error))
        return
    try:
        backend.bind_to_thread()
        for trial in trials:
            yield _try(name, backend, trial, compute)
    finally:
        backend.close()


def _try(name: str, backend: Backend, trial: _Trial, compute: str) -> Finding:
    kernel = backend.capabilities.kernel
    try:
        found = _run(backend, trial.model, trial.layers, "f16", compute)
    except LaminaError as error:
        return Finding(name, kernel, trial.name, float("inf"), trial.tolerance, str(error))
    pairs = zip(found, trial.expected, strict=True)
    return Finding(name, kernel, trial.name, max(_relative_error(*pair) for pair in pairs), trial.tolerance)


def _relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    if not np.isfinite(found).all():
        return float("inf")
    exact = expected.astype(np.float64)
    return float(np.linalg.norm(found - exact) / (np.linalg.norm(exact) or 1.0))


def _run(backend: Backend, model: OpenedModel, layers: LayerRange, kv_dtype: str, compute: str) -> Values:
    """What each step leaves: hidden states float32 [rows, H], or logits float32 [1, vocab] with the last layer."""
    settings = StageSettings(
        max_rows=max(_CHUNKS), max_seqs=1, max_logit_rows=1, max_context=_NUM_BLOCKS * BLOCK_TOKENS, kv_dtype=kv_dtype
    )
    stage = Stage(backend, model.spec, layers, settings, compute=compute)
    try:
        stage.load(model.file.tensors, lambda _: None)
        stage.allocate_cache((_NUM_BLOCKS,) * len(model.spec.cache_groups))
        return [stage.forward(step).copy() for step in _steps(model.spec)]
    finally:
        stage.free()


def _steps(spec: ModelSpec) -> Iterator[ReadyStep]:
    """The prompt, the same in every run: tokens spread over the vocabulary."""
    ids = [(7919 * i + 11) % spec.vocab_size for i in range(_NUM_TOKENS)]
    pos = 0
    for number, count in enumerate(_CHUNKS):
        tokens, end = tuple(ids[pos : pos + count]), pos + count
        blocks = tuple(BlockId(block) for block in range(-(-pos // BLOCK_TOKENS), -(-end // BLOCK_TOKENS)))
        piece = SeqSlice(SeqId(0), pos, count, Tokens(tokens), (blocks,) * len(spec.cache_groups), True)
        yield ReadyStep(StepPlan(Epoch(1), StepId(number), (piece,)), np.array(tokens, np.int32), None)
        pos = end
