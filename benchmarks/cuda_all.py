"""Everything there is to run on a machine with NVIDIA GPUs: tests, the backend alone, whole workers, memory over time.

Prints a table and writes one file with all figures, `tests.*` among them (1 if all passed). Exits with 1 if any failed.
cuda.host.decode.MODEL is what a decoded token takes through a worker beyond what the backend's recording takes when it
is replayed without a pause: the host's time that the card does not hide.

    python benchmarks/cuda_all.py --json benchmarks/results/cuda-all.json
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REPO = Path(__file__).resolve().parents[1]
_SOURCES = ("proto", "coordinator", "rpc_worker", "kernels", "tests", "benchmarks")
_PYTEST = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short")

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A command of the run; a test's figure is whether it passed, a benchmark's are those of its file."""

    name: str
    arguments: Sequence[str]
    is_test: bool
    timeout_s: float
    needs_devices: int = 1


def _worker(model: str, *patterns: str, devices: Sequence[str] = ()) -> tuple[str, ...]:
    """The worker benchmark of a model; of its figures those that match."""
    chosen = [word for pattern in patterns for word in ("--only", pattern)]
    return ("benchmarks/cuda_worker.py", "--models", model, *chosen, *(("--devices", *devices) if devices else ()))


_ONE_WORKER = ("cuda.decode.*", "cuda.prefill.*")
_SPLITS = ("cuda.rpc.*", "cuda.stages2.*", "cuda.mixed.*")
_TWO_CARDS = _worker("qwen7b", "cuda.daemon2.*", "cuda.rpc.*", devices=("cuda:0", "cuda:1"))
JOBS = (
    Job("tests.kernels", (*_PYTEST, "-n", "8", "tests/kernels"), True, 600),
    Job("tests.models", (*_PYTEST, "-n", "4", "tests/gpu", "--ignore", "tests/gpu/test_cuda_soak.py"), True, 600),
    Job("tests.worker", (*_PYTEST, "-n", "4", "tests/worker"), True, 600),
    Job("worker.qwen7b", _worker("qwen7b", *_ONE_WORKER, *_SPLITS), False, 900),
    Job("worker.llama1b", _worker("llama1b"), False, 900),
    Job("backend", ("benchmarks/cuda_backend.py",), False, 600),
    Job("cards2.qwen7b", _TWO_CARDS, False, 600, 2),
    Job("worker.llama8b", _worker("llama8b", *_ONE_WORKER), False, 600),
    Job("tests.soak", (*_PYTEST, "tests/gpu/test_cuda_soak.py"), True, 600),
)


def run(job: Job, extra: Sequence[str]) -> tuple[list[Entry], bool]:
    """Figures of a job, and whether it ended well."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, *job.arguments, *(() if job.is_test else (*extra, "--json", str(path)))]
        try:
            result = subprocess.run(
                command,
                cwd=_REPO,
                env=os.environ | {"PYTHONPATH": path_of_sources()},
                capture_output=True,
                text=True,
                check=False,
                timeout=job.timeout_s,
            )
        except subprocess.TimeoutExpired:
            print(f"{job.name}: still running after {job.timeout_s:.0f} s", file=sys.stderr)
            return [], False
        passed = result.returncode == 0
        if not passed:
            print(f"{job.name}: {(result.stdout + result.stderr)[-3000:]}", file=sys.stderr)
        if not job.is_test:
            entries: list[Entry] = json.loads(path.read_text("utf-8"))["figures"] if path.exists() else []
            return [entry | {"job": job.name} for entry in entries], passed
        summary = re.findall(r"\d+ (?:passed|failed|skipped|errors?)[^\n]*", result.stdout)
        note = summary[-1] if summary else ""
        return [{"name": job.name, "value": int(passed), "unit": "all passed", "job": job.name, "note": note}], passed


def path_of_sources() -> str:
    """The repository's own sources before whatever the caller's path has."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*(str(_REPO / source) for source in _SOURCES), *filter(None, before)])


def host_times(entries: Sequence[Entry]) -> list[Entry]:
    """cuda.host.decode.*, where both rates of one stream were measured."""
    rates = {entry["name"]: float(entry["value"]) for entry in entries}
    found = []
    for name, alone in rates.items():
        behind = rates.get(name.replace("cuda.backend.", "cuda."))
        if name.startswith("cuda.backend.decode.") and name.endswith(".b1.d0") and behind is not None:
            model = name.removeprefix("cuda.backend.decode.").removesuffix(".b1.d0")
            found.append({"name": f"cuda.host.decode.{model}", "value": 1e6 * (1 / behind - 1 / alone), "unit": "us"})
    return found


def machine() -> str:
    """The cards and their driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit("nvidia-smi is not there: this runs on a machine with NVIDIA GPUs and their driver")
    return "; ".join(found.stdout.split("\n")).strip("; ")


def show(entries: Sequence[Entry]) -> None:
    """A line each."""
    for entry in entries:
        ratio = entry.get("ratio")
        versus = "" if ratio is None else f"{ratio:6.2f} x peer"
        print(f"{entry['name']:48s} {entry['value']:14,.1f} {entry['unit']:26s} {versus}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", default="", help="jobs whose names begin so")
    parser.add_argument("--quick", action="store_true", help="fewer rounds of the workers")
    args = parser.parse_args()
    entries: list[Entry] = []
    all_passed = True
    cards = machine()
    num_devices = len(cards.split("; "))
    for job in (job for job in JOBS if job.name.startswith(args.only) and job.needs_devices <= num_devices):
        found, passed = run(job, ("--quick",) if args.quick and "cuda_worker" in job.arguments[0] else ())
        all_passed &= passed
        show(found)
        entries += found
        if args.json:  # a run that is cut off leaves what it has
            write(args.json, cards, entries + host_times(entries))
    show(host_times(entries))
    return 0 if all_passed else 1


def write(path: Path, cards: str, entries: Sequence[Entry]) -> None:
    """The file of figures."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=_REPO, capture_output=True, text=True, check=False
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = {"commit": commit.stdout.strip(), "date": today, "machine": cards, "figures": list(entries)}
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
