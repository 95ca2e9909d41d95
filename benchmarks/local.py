"""One worker behind gRPC against llama.cpp on the same threads, and against the same stage in process.

Figures: decode.MODEL.tN.dDEPTH, prefill.MODEL.tN.pTOKENS, streamsS.MODEL.tN (tokens/s; peer is llama.cpp) and
loopback.MODEL.tN (decode behind gRPC; peer is the stage in process).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from contest import Contestant, ContestantFailed, Worker, start_inprocess, start_ours
from peer import start_peer, use_isa_of_peer
from report import Figure, Report, argument_parser, figure, stop_on_sigterm, take_turns
from shapes import model_path

MODELS = ("smollm2", "llama1b", "qwen05b", "moe1b")
_ASK_S = 900.0


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: a command of the contestants and its number (depth, prompt tokens or streams)."""

    model: str
    threads: int
    op: str  # decode, prefill, streams, loopback
    number: int
    num_tokens: int = 0  # decoded, per stream

    @property
    def name(self) -> str:
        where = f"{self.model}.t{self.threads}"
        match self.op:
            case "decode":
                return f"decode.{where}.d{short_count(self.number)}"
            case "prefill":
                return f"prefill.{where}.p{self.number}"
            case "streams":
                return f"streams{self.number}.{where}"
            case _:
                return f"loopback.{where}"

    def run(self, contestant: Contestant, round_: int) -> float:
        """One sample, tokens per second. Prompts to prefill differ by round, so that no cached prefix serves them."""
        match self.op:
            case "prefill":
                arguments = {"num_tokens": self.number, "salt": 1000 + self.number * 50 + round_}
            case "streams":
                arguments = {"num_streams": self.number, "num_tokens": self.num_tokens, "salt": self.number}
            case _:
                arguments = {"depth": self.number, "num_tokens": self.num_tokens, "salt": 7 + self.number}
        op = "decode" if self.op == "loopback" else self.op
        return float(contestant.ask(op, timeout_s=_ASK_S, **arguments))

    def compare(self, ours: Contestant, peer: Contestant, num_rounds: int, *, name: str = "", note: str = "") -> Figure:
        """The figure, from rounds in which the two take turns."""
        samples = take_turns(num_rounds, [lambda r: self.run(ours, r), lambda r: self.run(peer, r)])
        return figure(name or self.name, "tokens/s", *samples, note=note)


def short_count(number: int) -> str:
    """4096 as "4k"."""
    return f"{number // 1024}k" if number and number % 1024 == 0 else str(number)


def cases_of(model: str, threads: int, *, quick: bool) -> Iterator[Case]:
    """The figures of one model and thread count."""
    num_tokens = 48 if model == "smollm2" else 24
    if quick and model == "moe1b":
        if threads == 1:
            yield Case(model, threads, "decode", 0, num_tokens)
            yield Case(model, threads, "prefill", 128)
    elif quick and threads == 1:
        yield Case(model, threads, "decode", 0, num_tokens)
        yield Case(model, threads, "prefill", 128)
        yield Case(model, threads, "loopback", 0, num_tokens)
    elif quick:
        yield Case(model, threads, "decode", 0, num_tokens)
        yield Case(model, threads, "decode", 4096, 12)
        yield Case(model, threads, "streams", 8, 16)
    else:
        yield from (Case(model, threads, "decode", depth, num_tokens) for depth in (0, 1024, 4096))
        yield from (Case(model, threads, "prefill", length) for length in (32, 128, 512))
        yield from (Case(model, threads, "streams", streams, 24) for streams in (2, 4, 8, 16))
        yield Case(model, threads, "loopback", 0, num_tokens)


def measure(cases: Sequence[Case], report: Report, num_rounds: int) -> None:
    """All the given cases, which are of one model and thread count."""
    path, threads = str(model_path(cases[0].model)), cases[0].threads
    with ExitStack() as stack:
        worker = stack.enter_context(closing(Worker("bench", threads=threads)))
        ours, peer = stack.enter_context(closing(start_ours())), stack.enter_context(closing(start_peer()))
        ours.ask("load", model=path, workers=[worker.address])
        facts = peer.ask("load", model=path, threads=threads, num_ctx=4096 + 256)
        report.facts["peer"] = {"name": "llama.cpp", "version": facts["version"], "system": facts["system"]}
        for case in cases:
            if case.op != "loopback":
                report.add(case.compare(ours, peer, num_rounds))
        peer.close()
        for case in cases:
            if case.op == "loopback":
                alone = stack.enter_context(closing(start_inprocess()))
                alone.ask("load", model=path, threads=threads)
                report.add(case.compare(ours, alone, num_rounds, note="peer: the same stage in process"))


def main() -> None:
    """Every model with 1 and 2 threads."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; repeatable")
    args = parser.parse_args()
    stop_on_sigterm()
    report = Report("local", args)
    num_rounds = args.rounds or (3 if args.quick else 5)
    try:
        report.facts["isa"] = use_isa_of_peer()
        for model in args.model or MODELS:
            for threads in (1, 2):
                wanted = [case for case in cases_of(model, threads, quick=args.quick) if report.wants(case.name)]
                if wanted:
                    measure(wanted, report, num_rounds)
    except (ContestantFailed, FileNotFoundError) as error:
        sys.exit(f"local: {error}")
    finally:
        report.finish()


if __name__ == "__main__":
    main()
