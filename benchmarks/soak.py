"""Mixed traffic with random cancellations against `coordinator serve` over two CPU workers: does anything stay behind?

Chats and completions, streamed or not, of many lengths and sampling parameters; shared prefixes, n > 1, JSON schemas,
bad requests, bursts beyond the queue, clients that leave. At each check the traffic pauses: every request must have its
answer, every KV block must be free again, no stage may know a sequence, no process may have logged an error, and a
probe must be answered as it was the first time. Memory is taken then, too. Exits with 1 if anything was wrong.

    python benchmarks/soak.py --minutes 30 --json FILE
"""

import asyncio
import random
import re
import statistics
import sys
import time
from pathlib import Path

from contest import ContestantFailed
from report import Figure, Report, argument_parser, stop_on_sigterm
from serving import Cluster, serving
from shapes import model_path
from traffic import Api, Traffic, Violation

_NUM_CLIENTS = 12
_BURST = 60  # requests at once, far more than run and wait together
_MAX_BURST_PAUSE_S = 30.0
_DRAIN_DEADLINE_S = 240.0
_MAX_GROWTH_MIB = 8.0  # between the middle and the last third of the run
_OPTIONS = ("--context", "2K", "--parallel", "6", "--max-waiting", "24")
_CACHE_TOKENS = 6 * 2048  # what those options make it
_MIB = 2**20


class Soak:
    """The run: traffic, pauses, checks."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._api = Api(cluster.host)
        self._rng = random.Random(seed)
        self.traffic = Traffic(self._api, self._rng)
        self.violations: list[Violation] = []
        self.memory_mib: dict[str, list[float]] = {name: [] for name in self._processes()}
        self.num_checks = 0
        self._num_blocks = 0  # free or cached at the first check

    async def run(self, seconds: float, check_every_s: float) -> None:
        """Until the time is over; the last thing is a check."""
        await self.traffic.fill_cache(_CACHE_TOKENS)  # memory that is touched for the first time looks like a leak
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pause_s = min(end_s, time.monotonic() + check_every_s)
            clients = [asyncio.create_task(self._client(pause_s)) for _ in range(_NUM_CLIENTS)]
            clients.append(asyncio.create_task(self._bursts(pause_s)))
            _, late = await asyncio.wait(clients, timeout=pause_s - time.monotonic() + _DRAIN_DEADLINE_S)
            for client in late:
                self.violations.append(Violation("stuck", "a client still waits for an answer"))
                client.cancel()
            for client in clients:
                if client.done() and not client.cancelled() and (error := client.exception()) is not None:
                    raise error
            await self._check()
            if late:
                return

    async def _client(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            violation = await self.traffic.one()
            if violation is not None:
                self.violations.append(violation)

    async def _bursts(self, until_s: float) -> None:
        """Some in every period, the first in its first half."""
        pause_s = min(_MAX_BURST_PAUSE_S, (until_s - time.monotonic()) / 2)
        while until_s - time.monotonic() > pause_s / 2:
            await asyncio.sleep(self._rng.uniform(0.2, 1.0) * pause_s)
            self.violations += await self.traffic.burst(_BURST)

    async def _check(self) -> None:
        """What must hold when nothing runs."""
        self.num_checks += 1
        say = self.violations.append
        try:
            cluster = await self._idle_state()
        except TimeoutError as error:
            say(Violation("stuck", str(error)))
            return
        blocks = await self._block_counts()
        total = blocks["cached"] + blocks["free"]  # what is cached is given up when it is wanted
        self._num_blocks = self._num_blocks or total
        if blocks["used"] or blocks["promised"] or total != self._num_blocks:
            say(Violation("leak", f"KV blocks when nothing runs: {blocks}, {self._num_blocks} in all"))
        for stage in cluster["stages"]:
            if stage["num_sequences"]:
                say(Violation("leak", f"stage {stage['stage']} knows {stage['num_sequences']} sequences"))
        if (changed := await self.traffic.probe()) is not None:
            say(changed)
        for line in self._cluster.take_alarms():
            say(Violation("log", line))
        for name, pid in self._processes().items():
            self.memory_mib[name].append(resident_mib(pid))
        print(self._line(blocks), file=sys.stderr, flush=True)

    async def _idle_state(self) -> dict[str, object]:
        """The cluster once the server counts no request and its look at the stages is a later one."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            cluster = await self._api.get("/admin/cluster")
            if not cluster["num_requests_running"] and not cluster["num_requests_waiting"]:
                await asyncio.sleep(2.5)  # the watch looks every two seconds
                return await self._api.get("/admin/cluster")
            await asyncio.sleep(0.2)
        raise TimeoutError(f"{cluster['num_requests_running']} requests run 30 s after the last client has gone")

    async def _block_counts(self) -> dict[str, int]:
        text = (await self._api.get_raw("/metrics")).decode()
        found = re.findall(r'^lamina_kv_cache_(?:blocks{state="(\w+)"}|(promised)_blocks) (\S+)$', text, re.MULTILINE)
        return {state or promised: int(float(count)) for state, promised, count in found}

    def _processes(self) -> dict[str, int]:
        workers = {f"worker{i}": worker.process.pid for i, worker in enumerate(self._cluster.workers)}
        return {"coordinator": self._cluster.pid, **workers}

    def _line(self, blocks: dict[str, int]) -> str:
        memory = ", ".join(f"{name} {values[-1]:.0f} MiB" for name, values in self.memory_mib.items())
        return f"check {self.num_checks}: {self.traffic.counts()}; blocks {blocks}; {memory}"


def resident_mib(pid: int) -> float:
    """Resident memory of a process, MiB (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ContestantFailed(f"process {pid} is gone")


def growth_mib(samples: list[float]) -> float:
    """Median of the last third less that of the third before: what is left once the start is over."""
    third = max(1, len(samples) // 3)
    return statistics.median(samples[-third:]) - statistics.median(samples[-2 * third : -third] or samples[:1])


def add_figures(report: Report, soak: Soak, seconds: float) -> list[Violation]:
    """Everything into the report; the violations, growing memory among them."""
    violations = list(soak.violations)
    for name, samples in soak.memory_mib.items():
        if not samples:
            continue
        growth = growth_mib(samples)
        note = f"{samples[0]:.0f} at the first check, {samples[-1]:.0f} at the last; growth of the last third"
        report.add(Figure(f"soak.growth.{name}", growth, "MiB", rounds=len(samples), note=note))
        if growth > _MAX_GROWTH_MIB:
            violations.append(Violation("memory", f"{name} grew by {growth:.1f} MiB: {[round(x) for x in samples]}"))
    for outcome, count in sorted(soak.traffic.outcomes.items()):
        report.add(Figure(f"soak.requests.{outcome}", count, "requests"))
    report.add(Figure("soak.tokens_per_s", soak.traffic.num_tokens / seconds, "tokens/s", note="of answered requests"))
    report.add(Figure("soak.checks", soak.num_checks, "checks"))
    report.add(Figure("soak.violations", len(violations), "violations"))
    report.facts["violations"] = [f"{item.kind}: {item.what}" for item in violations[:50]]
    return violations


def main() -> None:
    """All of it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=0, help="how long; 30, or 3 with --quick")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic")
    args = parser.parse_args()
    stop_on_sigterm()
    seconds = 60 * (args.minutes or (3 if args.quick else 30))
    report = Report("soak", args)
    violations = [Violation("start", "the run did not come to its end")]
    try:
        with serving(model_path("smollm2"), 2, more=_OPTIONS) as cluster:
            soak = Soak(cluster, args.seed)
            start = time.monotonic()
            asyncio.run(soak.run(seconds, check_every_s=min(60.0, max(15.0, seconds / 12))))
            violations = add_figures(report, soak, time.monotonic() - start)
    except (ContestantFailed, FileNotFoundError) as error:
        sys.exit(f"soak: {error}")
    finally:
        report.finish()
    for violation in violations[:50]:
        print(f"{violation.kind}: {violation.what}", file=sys.stderr)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
