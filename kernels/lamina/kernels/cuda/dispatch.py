"""Which plan serves which op. A planner with the queue of rotations in front."""

from collections.abc import Mapping
from typing import TypeVar

from lamina.kernels.buffer import Buffer, DType, KvCache, StepShape, Weight
from lamina.kernels.cuda import expert_plan, linear_plan, rows_plan
from lamina.kernels.cuda.attention_plan import AttentionArgs, plan_attention
from lamina.kernels.cuda.device import Device
from lamina.kernels.cuda.planner import Planner
from lamina.kernels.cuda.rows_plan import RotationQueue
from lamina.kernels.cuda.shared_norm import Launches, NormAfter
from lamina.kernels.ops import Args, LaunchError, OpSpec, Value

T = TypeVar("T")


class _Typed:
    """Arguments of a validated op, each as the type its signature says."""

    def __init__(self, args: Mapping[str, Value]) -> None:
        self._args = args

    def _get(self, name: str, kind: type[T]) -> T:
        value = self._args[name]
        if not isinstance(value, kind):
            raise LaunchError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
        return value

    def written(self) -> Buffer:
        """The operand whose extent says how many rows the op acts on."""
        return self.buffer(next(name for name in ("out", "x", "k") if name in self._args))

    def buffer(self, name: str) -> Buffer:
        return self._get(name, Buffer)

    def optional_buffer(self, name: str) -> Buffer | None:
        return None if self._args[name] is None else self._get(name, Buffer)

    def weight(self, name: str) -> Weight:
        return self._get(name, Weight)

    def cache(self) -> KvCache:
        return self._get("cache", KvCache)

    def number(self, name: str) -> float:
        return self._get(name, float)

    def integer(self, name: str) -> int:
        return self._get(name, int)

    def text(self, name: str) -> str:
        return self._get(name, str)

    def flag(self, name: str) -> bool:
        return self._get(name, bool)


class OpPlanner(Planner):
    """Plans ops by name."""

    def __init__(self, device: Device, compute: DType | None = None) -> None:
        super().__init__(device, compute)
        self._rotations = RotationQueue(self)
        self._shared_norm: NormAfter | None = None

    def set_shape(self, shape: StepShape, *, one_row_each: bool, exact: bool = True) -> None:
        """The sizes that calls are launched for from now on; what waits was meant for the sizes before."""
        if shape != self.shape:
            self.flush()
        self.shape, self.one_row_each, self.exact = shape, one_row_each, exact

    def flush(self) -> None:
        """Send out what waits."""
        self._rotations.flush()

    def drop(self) -> None:
        """Forget what waits, what is prepared and what follows."""
        self.following = ()
        self._rotations.drop()
        self.forget()

    def plan_all(self, launches: Launches) -> None:
        """A whole recording, in which norms may be shared by the products around them."""
        self._shared_norm = None
        for i, (op, args) in enumerate(launches):
            if self._shared_norm is not None:  # this op, which is done
                self._shared_norm = None
                continue
            self.following = launches[i + 1 :]
            self.plan(op, args)
        self.following = ()
        self.flush()

    def plan(self, op: OpSpec, args: Args) -> None:
        """Turn one validated op into calls; into none where no row wants it (a step without logits)."""
        a = _Typed(args)
        if self.rows_of(a.written()).capacity == 0:
            return
        if op.name == "rope":
            table, magnitude = a.buffer("inv_freq"), a.number("magnitude")
            self._rotations.rotate(
                a.buffer("x"), a.buffer("positions"), table, a.integer("head_dim"), a.text("layout"), magnitude
            )
        elif op.name == "kv_write":
            self._rotations.store(a.buffer("k"), a.buffer("v"), a.buffer("slots"), a.cache())
        else:
            self.flush()
            self._plan_now(op.name, a)

    def _plan_now(self, name: str, a: _Typed) -> None:
        match name:
            case "embed":
                linear_plan.plan_embed(self, a.buffer("tokens"), a.weight("table"), a.buffer("out"), a.number("scale"))
            case "rms_norm":
                rows_plan.plan_rms_norm(self, a.buffer("x"), a.buffer("weight"), a.buffer("out"), a.number("eps"))
            case "linear":
                x, weight, out = a.buffer("x"), a.weight("weight"), a.buffer("out")
                self._shared_norm = linear_plan.plan_linear(self, x, weight, out, a.flag("accumulate"))
            case "gated_linear":
                linear_plan.plan_gated_linear(
                    self, a.buffer("x"), a.weight("weight"), a.buffer("out"), a.text("activation")
                )
            case "route":
                router = (a.text("gating"), a.flag("normalise"), a.number("scale"))
                expert_plan.plan_route(self, a.buffer("x"), a.buffer("experts"), a.buffer("shares"), *router)
            case "expert_gated_linear":
                expert_plan.plan_expert_gated(
                    self, a.buffer("x"), a.buffer("experts"), a.weight("weight"), a.buffer("out"), a.text("activation")
                )
            case "expert_linear":
                x, chosen = a.buffer("x"), (a.buffer("experts"), a.buffer("shares"))
                expert_plan.plan_expert_linear(
                    self, x, *chosen, a.weight("weight"), a.buffer("out"), a.flag("accumulate")
                )
            case "attention":
                plan_attention(self, _attention_args(a))
            case "add":
                rows_plan.plan_add(self, a.buffer("x"), a.buffer("y"), a.buffer("out"))
            case "softcap":
                rows_plan.plan_softcap(self, a.buffer("x"), a.number("cap"))
            case "gather_rows":
                rows_plan.plan_gather_rows(self, a.buffer("x"), a.buffer("indices"), a.buffer("out"))
            case "argmax":
                rows_plan.plan_argmax(self, a.buffer("x"), a.buffer("out"))
            case "sample":
                rows_plan.plan_sample(self, a.buffer("x"), a.buffer("params"), a.buffer("out"))
            case _:
                raise LaunchError(f"cuda has no op {name}")


def _attention_args(a: _Typed) -> AttentionArgs:
    return AttentionArgs(
        a.buffer("q"),
        a.cache(),
        a.buffer("positions"),
        a.buffer("row_starts"),
        a.buffer("block_table"),
        a.buffer("out"),
        a.number("scale"),
        a.integer("window"),
        a.number("softcap"),
        a.optional_buffer("sinks"),
    )
