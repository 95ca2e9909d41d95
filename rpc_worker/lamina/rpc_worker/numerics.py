"""In which dtype a stage's large products multiply, and what happens when f16 is too narrow for its model.

`resolve_compute` is a pure table. `Precision` belongs to one stage and its compute thread: it launches the stage's
steps in the dtype in force, and where f16 overflows it finds the layer, changes to a wider dtype for good and runs the
step again. The step's own keys and values are overwritten by that, so nothing goes on from a poisoned cache (A-08).
"""

import logging

import numpy as np

from lamina.kernels.backend import Backend
from lamina.kernels.buffer import DType
from lamina.rpc_worker.stage_model import StageModel, StepArrays
from lamina.spec.errors import InvalidConfig
from lamina.spec.model import LayerRange, ModelSpec

_log = logging.getLogger(__name__)
COMPUTE_DTYPES = ("auto", "f32", "bf16", "f16")

# Architectures whose activations exceed f16's 65,504, from this hidden size on: Qwen2.5-7B overflows in its
# down projections, Gemma 3 and gpt-oss were trained in bf16 with residuals and products beyond it.
_OVERFLOWING_FROM = {"qwen2": 3584, "gemma2": 0, "gemma3": 0, "gpt-oss": 0}


def overflows_f16(spec: ModelSpec) -> bool:
    """Whether the model is known to leave f16's range, so that `auto` never chooses it (A-01)."""
    smallest = _OVERFLOWING_FROM.get(spec.architecture)
    return smallest is not None and spec.hidden >= smallest


def resolve_compute(wish: str, offered: tuple[str, ...], *, overflowing: bool) -> DType:
    """What products multiply in on one device. `offered` is what it can do, best first.

    A wish is obeyed where the device offers it, even f16 for an overflowing model: the probe still watches. Where it
    does not, and with `auto`, it is the best offer that the model can bear. Raises InvalidConfig for an unknown wish.
    """
    if wish not in COMPUTE_DTYPES:
        raise InvalidConfig(f"--compute-dtype {wish!r} is none of {', '.join(COMPUTE_DTYPES)}")
    if wish in offered:
        return DType(wish)
    return DType(next((name for name in offered if not (overflowing and name == "f16")), offered[0]))


class Precision:
    """See the module docstring."""

    def __init__(self, backend: Backend, spec: ModelSpec, layers: LayerRange, wish: str) -> None:
        self._backend = backend
        self._spec = spec
        self._layers = layers
        offered = backend.capabilities.compute_dtypes
        self.dtype = resolve_compute(wish, offered, overflowing=overflows_f16(spec))
        self._wider = next((DType(name) for name in offered if name != "f16"), None)

    def apply(self) -> None:
        """Have the backend, which other stages may share, compute as this stage does."""
        self._backend.set_compute(self.dtype)

    def launch(self, model: StageModel, step: StepArrays) -> None:
        """Run a step; in f16, run it again in a wider dtype if it overflowed."""
        self.apply()
        model.launch(step)
        if self.dtype is DType.F16 and self._wider is not None:
            num_bad = _num_nonfinite_rows(model, step)
            if num_bad:
                self._widen(model, step, self._wider, num_bad)

    def _widen(self, model: StageModel, step: StepArrays, wider: DType, num_bad: int) -> None:
        """Keep the wider dtype if it cures any row: others hold what a damaged weight or an earlier stage left."""
        layer = model.first_nonfinite_layer(step)
        self._backend.set_compute(wider)
        model.launch_op_by_op(step)
        if _num_nonfinite_rows(model, step) >= num_bad:
            return
        model.forget_recordings()
        narrow, self.dtype = self.dtype, wider
        where = f"layers {self._layers}" if layer is None else f"layer {layer}"
        _log.warning(
            "model %s, %s: values on %s exceed %s; this device computes its layers in %s from now on, the step was"
            " run again",
            self._spec.name,
            where,
            self._backend.device_facts().name,
            narrow.value,
            wider.value,
        )


def _num_nonfinite_rows(model: StageModel, step: StepArrays) -> int:
    """Rows that the step has spoilt: what came in not finite is another's fault.

    Where every row has logits they tell; they are small on their way through the device, and come with the answer.
    """
    shape = step.shape
    if model.is_last and shape.num_logit_rows == shape.num_rows:
        return int(np.count_nonzero(model.best(shape.num_logit_rows) < 0))
    spoilt = ~np.isfinite(model.hidden(shape.num_rows)).all(axis=1)
    if step.hidden is not None:
        spoilt &= np.isfinite(step.hidden).all(axis=1)
    if model.is_last and shape.num_logit_rows:
        return int(np.count_nonzero(spoilt)) + int(np.count_nonzero(model.best(shape.num_logit_rows) < 0))
    return int(np.count_nonzero(spoilt))
