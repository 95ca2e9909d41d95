"""CUDA workers end to end: worker processes behind gRPC, driven as `coordinator` drives them, without the HTTP server.

Figures: cuda.decode.MODEL.bSTREAMS.dDEPTH, cuda.prefill.MODEL.pTOKENS (one worker) and cuda.rpc.decode.MODEL (two
workers, which share the cards there are), tokens/s. No peer in this run: llama.cpp's figures on the same kind of
card stand in docs/performance.md, with where they come from.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

from contest import Contestant, Worker, start_ours
from report import Figure, Report, argument_parser, figure
from shapes import model_path

_ASK_S = 300.0
_CHUNK_TOKENS = 2048  # of a prompt in one step


def measure(ours: Contestant, model: str, *, quick: bool) -> Iterator[Figure]:
    """One worker's figures."""
    rounds = 2 if quick else 5
    for depth, name in ((0, "d0"), (8000, "d8000")):
        samples = [
            float(ours.ask("decode", timeout_s=_ASK_S, depth=depth, num_tokens=128, salt=r)) for r in range(rounds + 1)
        ]
        yield figure(f"cuda.decode.{model}.b1.{name}", "tokens/s", samples[1:])
    for streams in (8, 32):
        samples = [
            float(ours.ask("streams", timeout_s=_ASK_S, num_streams=streams, num_tokens=96, salt=10 + r))
            for r in range(rounds + 1)
        ]
        yield figure(f"cuda.decode.{model}.b{streams}.d0", "tokens/s", samples[1:])
    for tokens in (512, 2048, 8000):
        samples = [
            float(ours.ask("prefill", timeout_s=_ASK_S, num_tokens=tokens, salt=100 * tokens + r))
            for r in range(rounds + 1)
        ]
        yield figure(f"cuda.prefill.{model}.p{tokens}", "tokens/s", samples[1:])


def measure_rpc(ours: Contestant, model: str, *, quick: bool) -> Iterator[Figure]:
    """Two workers' figures."""
    rounds = 2 if quick else 5
    samples = [float(ours.ask("decode", timeout_s=_ASK_S, depth=0, num_tokens=128, salt=r)) for r in range(rounds + 1)]
    yield figure(f"cuda.rpc.decode.{model}", "tokens/s", samples[1:])
    samples = [
        float(ours.ask("streams", timeout_s=_ASK_S, num_streams=8, num_tokens=96, salt=20 + r))
        for r in range(rounds + 1)
    ]
    yield figure(f"cuda.rpc.streams8.{model}", "tokens/s", samples[1:])


def main() -> None:
    """Measure and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama1b", "qwen7b"], help="shapes to measure")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:0"], help="devices of the two RPC workers")
    args = parser.parse_args()
    report = Report("cuda_worker", args)
    for model in args.models:
        path = str(model_path(model))
        for devices, run in ((args.devices[:1], measure), (args.devices, measure_rpc)):
            with ExitStack() as stack:
                workers = [
                    stack.enter_context(closing(Worker(f"gpu{i}", device=device))) for i, device in enumerate(devices)
                ]
                ours = stack.enter_context(closing(start_ours()))
                addresses = [worker.address for worker in workers]
                ours.ask("load", timeout_s=_ASK_S, model=path, workers=addresses, max_rows=_CHUNK_TOKENS)
                for item in run(ours, model, quick=args.quick):
                    report.add(item)
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
