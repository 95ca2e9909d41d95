"""What context costs: one stage in process, decode and prefill at depths of 0 to 32k tokens, per KV type.

Figures, N threads: depth.decode.MODEL.KV.tN.dDEPTH (ms of a step of one token), depth.prefill.MODEL.KV.tN.dDEPTH (ms of
a step of 256 tokens), and depth.read.MODEL.KV.tN.dDEPTH (GB/s of keys and values in decode: bytes of the context over
the time beyond that of depth 0). Each is the least of several steps in each round. The cache before a depth is not
computed but taken as it was allocated, which costs attention the same.
"""

import sys
from contextlib import closing

from contest import Contestant, ContestantFailed, start_inprocess
from local import short_count
from report import Report, argument_parser, figure, stop_on_sigterm
from shapes import SHAPES, model_path

KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "bf16": 2.0, "f32": 4.0}
PREFILL_ROWS = 256
_ASK_S = 900.0


def depths_of(context: int, *, quick: bool) -> list[int]:
    """0 and the depths that fit the context with a step of prefill behind them."""
    depths = (0, 4096) if quick else (0, 4096, 16384, 32768)
    return [depth for depth in depths if depth + PREFILL_ROWS <= context]


def measure(model: str, kv_dtype: str, threads: int, report: Report, *, quick: bool, num_rounds: int) -> None:
    """All figures of one model, KV type and thread count."""
    shape = SHAPES[model]
    depths = depths_of(shape.context, quick=quick)
    names = {(op, depth): f"depth.{op}.{model}.{kv_dtype}.t{threads}.d{short_count(depth)}"
             for op in ("decode", "prefill", "read") for depth in depths}  # fmt: skip
    if not report.wants(*names.values()):
        return
    with closing(start_inprocess()) as stage:
        cache_tokens = depths[-1] + PREFILL_ROWS
        stage.ask("load", model=str(model_path(model)), threads=threads, kv_dtype=kv_dtype, cache_tokens=cache_tokens,
                  timeout_s=_ASK_S)  # fmt: skip
        decode: dict[int, list[float]] = {}
        for depth in depths:
            decode[depth] = [_step_s(stage, depth, 1, 6) for _ in range(num_rounds)]
            prefill = [_step_s(stage, depth, PREFILL_ROWS, 1) for _ in range(num_rounds)]
            report.add(figure(names["decode", depth], "ms", [1e3 * s for s in decode[depth]]))
            report.add(figure(names["prefill", depth], "ms", [1e3 * s for s in prefill]))
    bytes_per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * KV_BYTES[kv_dtype]
    for depth in depths[1:]:
        extra = [deep - shallow for deep, shallow in zip(decode[depth], decode[0], strict=True)]
        rates = [depth * bytes_per_token / seconds / 1e9 for seconds in extra]
        report.add(figure(names["read", depth], "GB/s", rates, note="of K and V"))


def _step_s(stage: Contestant, depth: int, num_rows: int, num_steps: int) -> float:
    return float(stage.ask("step_at", depth=depth, num_rows=num_rows, num_steps=num_steps, timeout_s=_ASK_S))


def main() -> None:
    """The shapes and KV types asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", action="append", choices=sorted(SHAPES), help="only this shape; repeatable")
    parser.add_argument("--kv-dtype", action="append", choices=sorted(KV_BYTES), help="only this type; repeatable")
    parser.add_argument("--threads", type=int, action="append", help="only this number; repeatable")
    args = parser.parse_args()
    stop_on_sigterm()
    report = Report("depth", args)
    try:
        for model in args.model or ("llama1b",):
            for kv_dtype in args.kv_dtype or ("f16", "q8_0"):
                for threads in args.threads or (1, 2):
                    measure(model, kv_dtype, threads, report, quick=args.quick, num_rounds=args.rounds or 3)
    except (ContestantFailed, FileNotFoundError) as error:
        sys.exit(f"depth: {error}")
    finally:
        report.finish()


if __name__ == "__main__":
    main()
