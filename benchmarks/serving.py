"""Serving: one and two workers of one thread behind the HTTP API, prefix cache, hops, and what the coordinator costs.

Figures: serve.wK.sN (tokens/s of K workers at N streams), scale.w2_over_w1.s8, scale.bound.s8 (what two stages without
any gap would reach: time of a step of 8 rows over one of 4 on one worker), busy.min.s8 (share of time that the less
busy of two stages spends inside ops), cpu.coordinator.s8 (its CPU time per token),
ttft.{cold_ms,warm_ms,warm_over_cold} (prefix of 1,000 tokens),
hop.{p50_us,p99_us} (16 KiB, worker to worker, loopback, idle) and hop.busy.{p50_us,p99_us} (beside a stage that
computes) on a direct connection, which frames take, hop.grpc.… (the same through gRPC),
coordinator.tokens_per_s (mock workers, 64 streams, full HTTP path), loop.us_per_step (64 sequences),
submit.us.{512,2048} (from a submitted prompt to its encoded plan).
The load generator is benchmarks/load.py: raw asyncio protocols, a process of its own.
"""

import os
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from contest import HERE, Contestant, ContestantFailed, Tail, Worker, child_environment, die_with_parent, stop_process
from report import Figure, Report, argument_parser, figure, stop_on_sigterm, take_turns
from shapes import MODELS, SMOLLM2, Shape, model_path, write_shape

STREAMS = (1, 4, 8, 16)
_AT_EIGHT = ("scale.w2_over_w1.s8", "busy.min.s8", "cpu.coordinator.s8")
_PREFIX_TOKENS = 1000
_FRAME_BYTES = 16 * 1024
_SUBMITTED_TOKENS = (512, 2048)
_MOCK_STREAMS = 64
_SERVING = re.compile(r"at (http://\S+?),")
_READY = re.compile(r"^ready")
_COORDINATOR = "from lamina.coordinator.cli import main; main()"
# SmolLM2's vocabulary and nothing else: what remains of a step is the framework
_MOCK_SHAPE = Shape("mock-text", "llama", "q8_0", 2, 64, 64, 2, 1, 32, 49152, 2048, 1e4, True)


@dataclass(slots=True)
class Cluster:
    """Workers and a serving coordinator."""

    workers: list[Worker]
    host: str  # host:port of the HTTP API
    pid: int  # of the coordinator
    log: Tail  # of the coordinator

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    def take_alarms(self) -> list[str]:
        """What any process has said of errors since the last time."""
        found: list[str] = []
        for log in (self.log, *(worker.log for worker in self.workers)):
            found += log.alarms
            log.alarms = []
        return found


@contextmanager
def serving(
    model: Path,
    num_workers: int,
    *,
    device: str = "cpu",
    split: str = "",
    context: str = "4K",
    parallel: int = 16,
    more: Sequence[str] = (),
) -> Iterator[Cluster]:
    """`coordinator serve` over workers of one thread each, ready; `more` are options that win over the others."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(closing(Worker(f"{device}{num_workers}-{i}", device=device, threads=1)))
            for i in range(num_workers)
        ]
        command = [sys.executable, "-c", _COORDINATOR, "serve", str(model), "--port", "0"]
        command += ["--workers", ",".join(worker.address for worker in workers)]
        command += ["--context", context, "--parallel", str(parallel), *more]
        if split:
            command += ["--split", split]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=child_environment(),
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        stack.callback(stop_process, process)
        log = Tail()
        log.follow(process.stdout)
        url = log.wait_for(_SERVING, 60)[1]
        log.wait_for(_READY, 120)
        yield Cluster(workers, url.removeprefix("http://"), process.pid, log)


def start_child(script: str) -> Contestant:
    """load.py, probe.py or engine_loop.py."""
    return Contestant(script, [sys.executable, str(HERE / script)])


def measure_scaling(report: Report, load: Contestant, probe: Contestant, num_rounds: int, *, quick: bool) -> None:
    """One worker and two, in turns, at each number of streams; how busy the two stages are at 8; hops, TTFT."""
    model = model_path("smollm2")
    with closing(start_child("split.py")) as splitter:
        split = str(splitter.ask("balanced", model=str(model), num_stages=2))
        with serving(model, 2, split=split) as trial:  # bytes are a first guess, time decides
            times = step_times(load, probe, trial, 8, salt=55)
        split = str(splitter.ask("timed", split=split, step_s=times))
    report.facts["split"] = split
    with serving(model, 1) as one, serving(model, 2, split=split) as two:
        if report.wants("scale.bound.s8"):
            few, many = (
                min(step_times(load, probe, one, streams, salt)[0] for salt in range(60, 63)) for streams in (4, 8)
            )
            note = f"steps of 8 and 4 rows: {1000 * many:.1f} and {1000 * few:.1f} ms"
            report.add(Figure("scale.bound.s8", many / few, "x", rounds=3, note=note))
        for streams in (1, 8) if quick else STREAMS:
            names = [f"serve.w{k}.s{streams}" for k in (1, 2)]
            if not report.wants(*names, *(_AT_EIGHT if streams == 8 else ())):
                continue
            num_tokens = 96 if quick else 192
            shares: list[float] = []
            costs: list[float] = []

            def run(cluster: Cluster, round_: int, streams: int = streams, n: int = num_tokens) -> float:
                answer = load.ask("streams", host=cluster.host, num_streams=streams, num_tokens=n, salt=round_)
                return float(answer["tokens_per_s"])

            def run_watched(
                round_: int, run=run, streams=streams, num_tokens=num_tokens, shares=shares, costs=costs
            ) -> float:
                before, cpu_s = probe.ask("busy", workers=two.addresses), process_cpu_s(two.pid)
                rate = run(two, round_)
                after = probe.ask("busy", workers=two.addresses)
                costs.append(1e6 * (process_cpu_s(two.pid) - cpu_s) / (streams * num_tokens))
                shares.append(min(busy_shares(before, after)))
                return float(rate)

            rates = take_turns(num_rounds, [lambda r, run=run: run(one, r), run_watched])
            for name, samples in zip(names, rates, strict=True):
                report.add(figure(name, "tokens/s", samples))
            if streams == 8:
                scale = [b / a for a, b in zip(*rates, strict=True)]
                report.add(Figure("scale.w2_over_w1.s8", statistics.median(scale), "x", 1.0, statistics.median(scale)))
                report.add(
                    figure("busy.min.s8", "share", shares[1:], note="of the whole run, prefill and gaps included")
                )
                report.add(figure("cpu.coordinator.s8", "us", costs[1:], note="a token, HTTP included"))
        if report.wants("ttft.cold_ms", "ttft.warm_ms", "ttft.warm_over_cold"):
            measure_ttft(report, load, one, num_rounds)
        for prefix, kind in _HOPS.items():
            if report.wants(*_hop_figures(prefix)):
                measure_hops(report, load, probe, one, two, prefix, kind, quick=quick)


def step_times(load: Contestant, probe: Contestant, cluster: Cluster, num_streams: int, salt: int) -> list[float]:
    """Seconds that each stage takes for a step while so many streams run."""
    before = probe.ask("busy", workers=cluster.addresses)
    load.ask("streams", host=cluster.host, num_streams=num_streams, num_tokens=48, salt=salt)
    after = probe.ask("busy", workers=cluster.addresses)
    return [(b["busy_s"] - a["busy_s"]) / (b["num_steps"] - a["num_steps"]) for a, b in zip(before, after, strict=True)]


def process_cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, its ended threads included (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_shares(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> list[float]:
    """Share of the time between two looks that each stage spent inside ops."""
    return [(b["busy_s"] - a["busy_s"]) / (b["at_s"] - a["at_s"]) for a, b in zip(before, after, strict=True)]


def measure_ttft(report: Report, load: Contestant, cluster: Cluster, num_rounds: int) -> None:
    """Each round a new prompt, asked twice: the second time its prefix is cached."""
    cold, warm = [], []
    for round_ in range(num_rounds + 1):
        times = [load.ask("ttft", host=cluster.host, prompt_tokens=_PREFIX_TOKENS, salt=900 + round_) for _ in range(2)]
        if round_:
            cold.append(1000 * times[0])
            warm.append(1000 * times[1])
    report.add(figure("ttft.cold_ms", "ms", cold))
    report.add(figure("ttft.warm_ms", "ms", warm))
    ratios = [b / a for a, b in zip(cold, warm, strict=True)]
    report.add(figure("ttft.warm_over_cold", "ratio", ratios, note=f"prompt of {_PREFIX_TOKENS} tokens"))


def measure_hops(
    report: Report,
    load: Contestant,
    probe: Contestant,
    one: Cluster,
    two: Cluster,
    prefix: str,
    kind: str,
    *,
    quick: bool,
) -> None:
    """Pings of 16 KiB on an edge: to an idle worker, and to one whose stage computes for 8 streams."""
    num_pings = 1000 if quick else 5000
    arguments = {"worker": two.addresses[1], "num_stages": 2, "num_pings": num_pings, "payload_bytes": _FRAME_BYTES}
    arguments["kind"] = kind
    names = iter(_hop_figures(prefix))
    idle = [1e6 * time for time in probe.ask("hop", **arguments)]
    report.add(quantile(idle, next(names), 0.5))
    report.add(quantile(idle, next(names), 0.99))
    computing = threading.Thread(
        target=lambda: load.ask("streams", host=one.host, num_streams=8, num_tokens=400, salt=77)
    )
    computing.start()
    arguments |= {"worker": one.addresses[0], "num_stages": 1, "num_pings": num_pings // 2, "pause_s": 0.002}
    busy = [1e6 * time for time in probe.ask("hop", **arguments)]
    computing.join()
    report.add(quantile(busy, next(names), 0.5))
    report.add(quantile(busy, next(names), 0.99))


def _hop_figures(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{when}{share}_us" for when in ("", "busy.") for share in ("p50", "p99"))


def quantile(samples: Sequence[float], name: str, share: float) -> Figure:
    """A quantile of many samples as a figure."""
    value = sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]
    return Figure(name, value, "us", rounds=len(samples))


def measure_coordinator(report: Report, load: Contestant, num_rounds: int, *, quick: bool) -> None:
    """Workers that compute nothing: what the coordinator and its HTTP API can carry."""
    model = MODELS / _MOCK_SHAPE.file_name
    if not model.is_file():
        write_shape(_MOCK_SHAPE, model, MODELS / SMOLLM2, first_token="mocktext")
    with serving(model, 2, device="mock", split="0-0,1-1", context="1K", parallel=_MOCK_STREAMS) as cluster:
        num_tokens = 150 if quick else 400
        answers = [
            load.ask("streams", host=cluster.host, num_streams=_MOCK_STREAMS, num_tokens=num_tokens, salt=i)
            for i in range(num_rounds + 1)
        ][1:]
    rates = [answer["tokens_per_s"] for answer in answers]
    events = statistics.median(answer["events_per_token"] for answer in answers)
    note = f"{_MOCK_STREAMS} streams, 2 mock workers, {events:.2f} events a token"
    report.add(figure("coordinator.tokens_per_s", "tokens/s", rates, note=note))


def measure_loop(report: Report, num_rounds: int) -> None:
    """The step loop alone; its profile goes to standard error."""
    with closing(start_child("engine_loop.py")) as child:
        arguments = {"num_seqs": 64, "num_stages": 2, "num_tokens": 300}
        times = [float(child.ask("measure", **arguments)["us_per_step"]) for _ in range(num_rounds + 1)][1:]
        report.add(figure("loop.us_per_step", "us", times, note="CPU time, steps of 64 sequences for 2 stages"))
        for num_tokens in _SUBMITTED_TOKENS:
            least = float(child.ask("submit", prompt_tokens=num_tokens, num_requests=100))
            note = f"CPU time until the plan of a prompt of {num_tokens} is encoded, least of 100"
            report.add(Figure(f"submit.us.{num_tokens}", least, "us", rounds=100, note=note))
        print(child.ask("measure", profile=True, **arguments)["profile"], file=sys.stderr)


def main() -> None:
    """All of it."""
    args = argument_parser(__doc__).parse_args()
    stop_on_sigterm()
    report = Report("serving", args)
    report.facts["load_generator"] = "benchmarks/load.py"
    num_rounds = args.rounds or (3 if args.quick else 5)
    try:
        if report.wants("loop.us_per_step", *(f"submit.us.{n}" for n in _SUBMITTED_TOKENS)):
            measure_loop(report, num_rounds)
        with closing(start_child("load.py")) as load, closing(start_child("probe.py")) as probe:
            if report.wants("coordinator.tokens_per_s"):
                measure_coordinator(report, load, num_rounds, quick=args.quick)
            if report.wants(*_SCALING):
                measure_scaling(report, load, probe, num_rounds, quick=args.quick)
    except (ContestantFailed, FileNotFoundError) as error:
        sys.exit(f"serving: {error}")
    finally:
        report.finish()


_HOPS = {"hop": "direct", "hop.grpc": "grpc"}
_SCALING = (
    *(f"serve.w{k}.s{n}" for k in (1, 2) for n in STREAMS),
    "scale.w2_over_w1.s8",
    "scale.bound.s8",
    "busy.min.s8",
    "cpu.coordinator.s8",
    "ttft.cold_ms",
    "ttft.warm_ms",
    "ttft.warm_over_cold",
    *(name for prefix in _HOPS for name in _hop_figures(prefix)),
)


if __name__ == "__main__":
    main()
