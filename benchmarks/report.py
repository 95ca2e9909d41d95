"""Figures of a benchmark run: medians over alternating rounds, their spread, the machine, the JSON file, the table.

Owns the file format: {commit, date, machine, figures: [{name, value, unit, peer, ratio, ...}]}. A figure's ratio is
better than 1 where ours is the better one, whichever way the unit points. Standard library only.

    python benchmarks/report.py FILE...      result files as Markdown tables
"""

import argparse
import fnmatch
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_REPO = Path(__file__).resolve().parents[1]
_LOWER_IS_BETTER = frozenset({"s", "ms", "us"})


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `peer` is the same for whom we compare with; spreads are (max - min) / median of rounds."""

    name: str
    value: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    spread: float | None = None
    peer_spread: float | None = None
    rounds: int = 1
    note: str = ""


def spread(samples: Sequence[float]) -> float:
    """(max - min) / median; 0 for a single sample."""
    return (max(samples) - min(samples)) / statistics.median(samples)


def figure(name: str, unit: str, ours: Sequence[float], peer: Sequence[float] = (), note: str = "") -> Figure:
    """Medians of both sides and their ratio, ours / peer (peer / ours for times)."""
    value = statistics.median(ours)
    if not peer:
        return Figure(name, value, unit, spread=spread(ours), rounds=len(ours), note=note)
    other = statistics.median(peer)
    ratio = other / value if unit in _LOWER_IS_BETTER else value / other
    return Figure(name, value, unit, other, ratio, spread(ours), spread(peer), len(ours), note)


def take_turns(num_rounds: int, sides: Sequence[Callable[[int], float]]) -> list[list[float]]:
    """Samples of each side, by round in turn; every other round runs in reverse order. A side gets the round's number.

    One warm-up round, number 0, is thrown away.
    """
    samples: list[list[float]] = [[] for _ in sides]
    for round_ in range(num_rounds + 1):
        order = list(enumerate(sides))
        for index, side in order if round_ % 2 else reversed(order):
            value = side(round_)
            if round_:
                samples[index].append(value)
    return samples


class Report:
    """Collects figures, prints each when it is there, and at the end the table and the file."""

    def __init__(self, script: str, args: argparse.Namespace) -> None:
        self.figures: list[Figure] = []
        self._script = script
        self._quick = bool(args.quick)
        self._path: Path | None = args.json
        self._only: list[str] = args.only
        self._start = time.monotonic()
        self._load_before = os.getloadavg()
        self._commit = commit()
        self.facts: dict[str, object] = {}

    def wants(self, *names: str) -> bool:
        """Whether --only lets any of these through."""
        return not self._only or any(fnmatch.fnmatch(name, pattern) for name in names for pattern in self._only)

    def add(self, figure: Figure) -> None:
        """Keep a figure."""
        self.figures.append(figure)
        print(f"[{time.monotonic() - self._start:5.0f} s] {format_figure(figure)}", file=sys.stderr, flush=True)
        self._write()

    def finish(self) -> None:
        """Write the file and print the table. Raises SystemExit, writing nothing, if no figure was measured."""
        if not self.figures:
            if sys.exc_info()[0] is None:  # else what is under way says why
                sys.exit(f"no figure was measured; --only {' '.join(self._only) or 'was not given'}")
            return
        self._write()
        print(table(self.figures))
        load = " ".join(f"{x:.1f}" for x in self._load_before), " ".join(f"{x:.1f}" for x in os.getloadavg())
        print(f"commit {self._commit}, {machine()}, load average {load[0]} before, {load[1]} after")

    def _write(self) -> None:
        if self._path is None:
            return
        document = {
            "commit": self._commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "script": self._script,
            "quick": self._quick,
            "load_before": self._load_before,
            "load_after": os.getloadavg(),
            "wall_s": round(time.monotonic() - self._start, 1),
            **self.facts,
            "figures": [figure_to_json(figure) for figure in self.figures],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document, indent=1) + "\n")


def figure_to_json(figure: Figure) -> dict[str, object]:
    """The five agreed keys, and spreads, rounds and the note where there are any."""
    document: dict[str, object] = {
        "name": figure.name,
        "value": _rounded(figure.value),
        "unit": figure.unit,
        "peer": _rounded(figure.peer),
        "ratio": _rounded(figure.ratio),
        "rounds": figure.rounds,
    }
    extra = {"spread": _rounded(figure.spread), "peer_spread": _rounded(figure.peer_spread), "note": figure.note}
    return document | {key: value for key, value in extra.items() if value not in (None, "")}


def table(figures: Sequence[Figure]) -> str:
    """Figures as aligned text."""
    rows = [("figure", "ours", "peer", "ratio", "spread", "unit")]
    for item in figures:
        spreads = [item.spread, item.peer_spread]
        shown = " / ".join(f"{100 * value:.0f}%" for value in spreads if value is not None)
        ratio = "" if item.ratio is None else f"{item.ratio:.2f}"
        unit = f"{item.unit}  {item.note}".rstrip()
        rows.append((item.name, _short(item.value), _short(item.peer), ratio, shown, unit))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(document: dict[str, Any]) -> str:
    """A result file as a table for docs/performance.md."""
    lines = ["| figure | ours | peer | ratio | spread | unit |", "|---|---:|---:|---:|---:|---|"]
    for item in document["figures"]:
        spreads = [f"{100 * item[key]:.0f} %" for key in ("spread", "peer_spread") if key in item]
        ratio = "" if item["ratio"] is None else f"{item['ratio']:.2f}"
        cells = [item["name"], _short(item["value"]), _short(item["peer"]), ratio, " / ".join(spreads), item["unit"]]
        lines.append(f"| {' | '.join(cells)} |")
    when = f"commit {document['commit']}, {document['date']}, {document['machine']}"
    load = f"load average {document['load_before'][0]:.1f} before, {document['load_after'][0]:.1f} after"
    return "\n".join([*lines, "", f"{document['script']}.py: {when}, {load}."])


def format_figure(figure: Figure) -> str:
    """One line."""
    against = "" if figure.peer is None else f", peer {_short(figure.peer)}, ratio {figure.ratio:.2f}"
    return f"{figure.name}: {_short(figure.value)} {figure.unit}{against}"


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options every script has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds of the main figures, under 6 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="figures to measure, like rpc.*")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per figure instead of the default")
    return parser


def stop_on_sigterm() -> None:
    """Leave by exception, so that what was started is stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def commit() -> str:
    """The checked-out commit, with -dirty if tracked files differ from it; "unknown" outside a repository."""
    try:
        words = ["git", "-C", str(_REPO), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Processor, cores that this process may use, memory."""
    name = platform.processor() or platform.machine()
    isa = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
        flags = next((line for line in lines if line.startswith("flags")), "").split()
        isa = next((f", {text}" for flag, text in _ISAS if flag in flags), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {cores} cores{isa}, {memory:.0f} GiB"


_ISAS = (("avx512_vnni", "AVX-512 VNNI"), ("avx512f", "AVX-512"), ("avx_vnni", "AVX-VNNI"), ("avx2", "AVX2"))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(markdown(json.loads(Path(name).read_text())), end="\n\n")
