"""The commands that look at devices without serving them: --self-test and --explain, as tables or JSON."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from lamina.kernels.backend import Backend, GraphMode
from lamina.kernels.registry import cpu_variants, select_backend
from lamina.rpc_worker.explain import explain_device, print_report, read_types
from lamina.rpc_worker.self_test import Finding, run_self_test
from lamina.rpc_worker.settings import WorkerSettings

EXIT_FAILED = 1
_COLUMNS = "{:<14} {:<32} {:<34} {:>10} {:>10}  {}"


def run_checkup(
    settings: WorkerSettings, devices: Iterable[str], model: Path | None, *, test: bool, as_json: bool
) -> int:
    """Print what was asked for; the exit code. Raises what a model file is refused with."""
    if not test:
        return _explain(settings, devices, model, as_json=as_json)
    candidates: dict[str, Callable[[], Backend]] = {}
    for name in devices:
        candidates |= cpu_variants() if name == "cpu" else {name: partial(_open, settings, name)}
    return show_findings(run_self_test(candidates, model, settings.compute_dtype), as_json=as_json)


def _open(settings: WorkerSettings, name: str) -> Backend:
    selection = select_backend(
        name,
        threads=settings.num_threads,
        max_memory_bytes=settings.max_memory_bytes,
        graphs=GraphMode(settings.cuda_graphs),
    )
    return selection.backend


def _explain(settings: WorkerSettings, devices: Iterable[str], model: Path | None, *, as_json: bool) -> int:
    types = None if model is None else read_types(model)
    reports = [explain_device(name, partial(_open, settings, name), types, settings.compute_dtype) for name in devices]
    if as_json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        for report in reports:
            print_report(report, types)
    return EXIT_FAILED if any(report.failure for report in reports) else 0


def show_findings(findings: Iterable[Finding], *, as_json: bool) -> int:
    """A line for each as it comes, or one JSON list; EXIT_FAILED if one is not as it should be."""
    if as_json:
        done = list(findings)
        print(json.dumps([_to_json(finding) for finding in done], indent=2))
        return 0 if done and all(finding.ok for finding in done) else EXIT_FAILED
    print(_COLUMNS.format("device", "kernels", "model", "error", "allowed", "").rstrip())
    num_failed = num_done = 0
    for finding in findings:
        verdict = "ok" if finding.ok else f"FAILED {finding.failure}".rstrip()
        error = "-" if finding.failure else f"{finding.max_error:.5f}"
        allowed = f"{finding.tolerance:.5f}"
        print(_COLUMNS.format(finding.device, finding.kernel, finding.model, error, allowed, verdict), flush=True)
        num_failed, num_done = num_failed + (not finding.ok), num_done + 1
    print(f"{num_done - num_failed} of {num_done} ok; errors are relative to the float32 reference")
    return EXIT_FAILED if num_failed or not num_done else 0


def _to_json(finding: Finding) -> dict[str, object]:
    error = finding.max_error if math.isfinite(finding.max_error) else None  # JSON has no infinity
    return asdict(finding) | {"max_error": error, "ok": finding.ok}
