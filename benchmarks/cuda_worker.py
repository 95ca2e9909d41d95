"""CUDA workers end to end: worker processes behind gRPC, driven as `coordinator` drives them, without the HTTP server.

One worker: cuda.decode.MODEL.bSTREAMS.dDEPTH and cuda.prefill.MODEL.pTOKENS, tokens/s. Two stages, each with decode (of
one stream), streams8 and prefill2048:

    cuda.rpc.…       two workers on the two `--devices` (by default they share one card)
    cuda.stages2.…   two stages of one worker on the first device
    cuda.daemon2.…   two stages of one worker on the two devices, if they differ
    cuda.mixed.…     a worker with a CPU beside the first device: two layers there, the rest on the card; decode only

cuda.start.warm_s: from launching a worker to its line "listening", kernels compiled before; cuda.start.token_s.MODEL:
from there on until a loaded model has answered its first token. The peer's figures are not of this run, see
cuda_peer.py.
"""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from contest import Contestant, Worker, start_ours
from cuda_peer import NOTE, peer_of
from report import Figure, Report, argument_parser, figure
from shapes import model_path

_ASK_S = 300.0
_CHUNK_TOKENS = 2048  # of a prompt in one step
_MIXED_LAYERS = 2  # on the CPU
_WARM_STARTS = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """Workers by their devices, and (worker, device) of each stage; figures are called `cuda.NAME.…`."""

    name: str
    workers: Sequence[Sequence[str]]
    stages: Sequence[tuple[int, int]]
    first_layers: int = 0


def measure(ours: Contestant, model: str, rounds: int) -> Iterator[Figure]:
    """One worker's figures."""
    for depth, name in ((0, "d0"), (8000, "d8000")):
        yield _decode(ours, f"cuda.decode.{model}.b1.{name}", rounds, depth=depth)
    for streams in (8, 32):
        yield _streams(ours, f"cuda.decode.{model}.b{streams}.d0", rounds, streams)
    for tokens in (512, 2048, 8000):
        yield _prefill(ours, f"cuda.prefill.{model}.p{tokens}", rounds, tokens)


def measure_split(ours: Contestant, name: str, model: str, rounds: int) -> Iterator[Figure]:
    """Two stages' figures."""
    yield _decode(ours, f"cuda.{name}.decode.{model}", rounds)
    yield _streams(ours, f"cuda.{name}.streams8.{model}", rounds, 8)
    yield _prefill(ours, f"cuda.{name}.prefill2048.{model}", rounds, 2048)


def _decode(ours: Contestant, name: str, rounds: int, depth: int = 0, num_tokens: int = 128) -> Figure:
    def ask(salt: int) -> float:
        return float(ours.ask("decode", timeout_s=_ASK_S, depth=depth, num_tokens=num_tokens, salt=salt))

    return _rate(name, rounds, ask)


def _streams(ours: Contestant, name: str, rounds: int, num_streams: int) -> Figure:
    def ask(salt: int) -> float:
        return float(ours.ask("streams", timeout_s=_ASK_S, num_streams=num_streams, num_tokens=96, salt=10 + salt))

    return _rate(name, rounds, ask)


def _prefill(ours: Contestant, name: str, rounds: int, num_tokens: int) -> Figure:
    def ask(salt: int) -> float:
        return float(ours.ask("prefill", timeout_s=_ASK_S, num_tokens=num_tokens, salt=100 * num_tokens + salt))

    return _rate(name, rounds, ask)


def _rate(name: str, rounds: int, ask: Callable[[int], float]) -> Figure:
    """The first round records and warms up."""
    samples, peer = [ask(salt) for salt in range(rounds + 1)][1:], peer_of(name)
    return figure(name, "tokens/s", samples) if peer is None else figure(name, "tokens/s", samples, [peer], NOTE)


def start_figures(device: str, paths: Sequence[tuple[str, str]]) -> Iterator[Figure]:
    """Starts with the compiled kernels on disk, which a start before has left there."""
    start_s: list[float] = []
    token_s: dict[str, list[float]] = {model: [] for model, _ in paths}
    for attempt in range(_WARM_STARTS + 1):
        for model, path in paths:
            begin = time.perf_counter()
            with ExitStack() as stack:
                worker = stack.enter_context(closing(Worker("gpu", device=device)))
                listening = time.perf_counter()
                ours = stack.enter_context(closing(start_ours()))
                ready = time.perf_counter()
                ours.ask("load", timeout_s=_ASK_S, model=path, workers=[worker.address], max_rows=_CHUNK_TOKENS)
                ours.ask("prefill", timeout_s=_ASK_S, num_tokens=16, salt=attempt)
                if attempt:
                    start_s.append(listening - begin)
                    token_s[model].append(time.perf_counter() - ready)
    yield figure("cuda.start.warm_s", "s", start_s)
    for model, samples in token_s.items():
        yield figure(f"cuda.start.token_s.{model}", "s", samples)


def setups(devices: Sequence[str]) -> Iterator[Setup]:
    """What there is to measure on these two devices, the first of them alone included."""
    first = devices[0]
    yield Setup("one", [devices[:1]], [(0, 0)])
    yield Setup("rpc", [[device] for device in devices], [(0, 0), (1, 0)])
    yield Setup("stages2", [[first]], [(0, 0), (0, 0)])
    if devices[1] != first:
        yield Setup("daemon2", [devices], [(0, 0), (0, 1)])
    yield Setup("mixed", [["cpu", first]], [(0, 0), (0, 1)], _MIXED_LAYERS)


def names_of(setup: Setup, model: str) -> list[str]:
    """A figure of each kind that a setup gives."""
    if setup.name == "one":
        return [f"cuda.decode.{model}.b1.d0", f"cuda.prefill.{model}.p2048"]
    return [f"cuda.{setup.name}.{kind}.{model}" for kind in ("decode", "streams8", "prefill2048")]


def run(setup: Setup, model: str, path: str, rounds: int, threads: int) -> Iterator[Figure]:
    """Start the workers, load, measure."""
    with ExitStack() as stack:
        workers = []
        for index, (first, *others) in enumerate(setup.workers):
            more = [word for device in others for word in ("--device", device)]
            worker = Worker(f"gpu{index}", device=first, threads=threads, more=more)
            workers.append(stack.enter_context(closing(worker)).address)
        ours = stack.enter_context(closing(start_ours()))
        ours.ask(
            "load",
            timeout_s=_ASK_S,
            model=path,
            workers=workers,
            max_rows=_CHUNK_TOKENS,
            stages=setup.stages,
            first_layers=setup.first_layers,
        )
        match setup.name:
            case "one":
                yield from measure(ours, model, rounds)
            case "mixed":
                yield _decode(ours, f"cuda.mixed.decode.{model}", min(rounds, 2), num_tokens=64)
            case name:
                yield from measure_split(ours, name, model, rounds)


def parser() -> ArgumentParser:
    """The command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama1b", "qwen7b"], help="shapes to measure")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:0"], help="devices of the two stages")
    parser.add_argument("--threads", type=int, default=8, help="of the CPU in a mixed worker")
    return parser


def main() -> None:
    """Measure and report."""
    args = parser().parse_args()
    report = Report("cuda_worker", args)
    rounds = args.rounds or (2 if args.quick else 5)
    paths = [(model, str(model_path(model))) for model in args.models]
    for model, path in paths:
        for setup in setups(args.devices):
            if report.wants(*names_of(setup, model)):
                for item in run(setup, model, path, rounds, args.threads):
                    report.add(item)
    if report.wants("cuda.start.warm_s"):
        for item in start_figures(args.devices[0], paths):
            report.add(item)
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
