"""Each op of the CPU backend against what the machine can do at most, ceilings measured in the same rounds.

Figures, N threads: gemv.TYPE.tN (GB/s of packed weights at 1 row, working set beyond every cache; peer is the DRAM read
ceiling), gemm.TYPE.tN.rROWS (GMAC/s; peer is the int8 ceiling), attention.KV.cCONTEXT.tN (GB/s of cache at 1 row),
op.NAME.tN (us at 1 row).
"""

import sys
from contextlib import closing

from ceilings import NoCompiler, measure_ceilings
from contest import HERE, Contestant, ContestantFailed
from report import Report, argument_parser, figure, stop_on_sigterm, take_turns

TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K")
SET_BYTES = 850 * 10**6
_OUT, _IN = 8192, 4096
_SMALL_SET_BYTES = 60 * 10**6
_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 32, 64, 128, 512)
_QUICK_ROWS = (1, 8, 16, 128)
_ROW_OPS = (("rms_norm", 2048), ("rope", 2048), ("add", 2048), ("kv_write", 512), ("argmax", 128256))


def measure(child: Contestant, threads: int, report: Report, *, quick: bool, num_rounds: int) -> None:
    """All figures of one thread count."""
    gemv(child, threads, report, num_rounds)
    for kind in ("Q4_K",) if quick else TYPES:
        gemm(child, kind, threads, report, _QUICK_ROWS if quick else _ROWS, num_rounds)
    attention(child, threads, report, (4096,) if quick else (4096, 16384, 32768), num_rounds)
    for op, columns in _ROW_OPS:
        name = f"op.{op}.t{threads}"
        if report.wants(name):
            child.ask("rows", name=op, columns=columns, head_dim=64, num_launches=200)
            times = [1e6 * float(child.ask("time", num_rows=1, min_s=0.05)) for _ in range(num_rounds)]
            report.add(figure(name, "us", times, note=f"1 row of {columns}"))


def gemv(child: Contestant, threads: int, report: Report, num_rounds: int) -> None:
    """Weights read per second at one row."""
    for kind in TYPES:
        name = f"gemv.{kind.lower()}.t{threads}"
        if not report.wants(name):
            continue
        held = child.ask("linear", kind=kind, out_features=_OUT, in_features=_IN, set_bytes=SET_BYTES)
        bytes_each = held["num_bytes"] / held["num_launches"]

        def ours(_: int, bytes_each: float = bytes_each) -> float:
            return bytes_each / float(child.ask("time", num_rows=1)) / 1e9

        samples = take_turns(num_rounds, [ours, lambda _: measure_ceilings(threads, 2).read_gbps])
        report.add(figure(name, "GB/s", *samples, note="peer: DRAM read ceiling"))


def gemm(
    child: Contestant, kind: str, threads: int, report: Report, row_counts: tuple[int, ...], num_rounds: int
) -> None:
    """Multiply-adds per second by number of rows; working set within the last-level cache, as prefill's panels are."""
    names = {rows: f"gemm.{kind.lower()}.t{threads}.r{rows}" for rows in row_counts}
    if not report.wants(*names.values()):
        return
    child.ask("linear", kind=kind, out_features=_OUT, in_features=_IN, set_bytes=_SMALL_SET_BYTES)
    for rows, name in names.items():

        def ours(_: int, rows: int = rows) -> float:
            return rows * _OUT * _IN / float(child.ask("time", num_rows=rows)) / 1e9

        ceiling = measure_ceilings(threads, 1).int8_gmacs
        sides = [ours] if ceiling is None else [ours, lambda _: measure_ceilings(threads, 1).int8_gmacs or 0.0]
        report.add(figure(name, "GMAC/s", *take_turns(num_rounds, sides), note="peer: int8 ceiling"))


def attention(child: Contestant, threads: int, report: Report, contexts: tuple[int, ...], num_rounds: int) -> None:
    """Decode of one sequence, 32 query and 8 KV heads of 64, as in Llama-1B."""
    for kv_dtype in ("f16", "q8_0"):
        for context in contexts:
            name = f"attention.{kv_dtype}.c{context // 1024}k.t{threads}"
            if not report.wants(name):
                continue
            num_layers = -(-SET_BYTES // (context * 2 * 8 * 64 * (2 if kv_dtype == "f16" else 1)))
            shape = {"heads": 32, "kv_heads": 8, "head_dim": 64, "kv_dtype": kv_dtype, "num_layers": num_layers}
            held = child.ask("attention", context=context, **shape)
            bytes_each = held["num_bytes"] / held["num_launches"]

            def ours(_: int, bytes_each: float = bytes_each) -> float:
                return bytes_each / float(child.ask("time", num_rows=1)) / 1e9

            samples = take_turns(num_rounds, [ours, lambda _: measure_ceilings(threads, 2).read_gbps])
            report.add(figure(name, "GB/s", *samples, note="peer: DRAM read ceiling"))


def main() -> None:
    """One and two threads."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, action="append", help="thread counts; 1 and 2 by default")
    args = parser.parse_args()
    stop_on_sigterm()
    report = Report("kernels", args)
    num_rounds = args.rounds or (3 if args.quick else 7)
    try:
        for threads in args.threads or (1, 2):
            with closing(Contestant("kernels", [sys.executable, str(HERE / "kernel_child.py")])) as child:
                report.facts["kernel"] = child.ask("open", device="cpu", threads=threads)
                measure(child, threads, report, quick=args.quick, num_rounds=num_rounds)
    except (ContestantFailed, NoCompiler) as error:
        sys.exit(f"kernels: {error}")
    finally:
        report.finish()


if __name__ == "__main__":
    main()
