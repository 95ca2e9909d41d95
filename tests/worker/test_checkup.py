"""--self-test and --explain: a good device passes, a corrupted layer does not, and what each generation would run."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from lamina.kernels.backend import Backend, Unsupported
from lamina.kernels.buffer import HostTensor, Weight
from lamina.kernels.cuda.backend import CudaBackend
from lamina.kernels.quant.dequantize import dequantize
from lamina.kernels.reference import ReferenceBackend
from lamina.kernels.registry import cpu_variants
from lamina.rpc_worker import command, self_test
from lamina.rpc_worker.checkup import show_findings
from lamina.rpc_worker.explain import explain_device, read_types
from lamina.rpc_worker.probe_model import PROBE_TYPES, random_matrix
from lamina.rpc_worker.self_test import TOLERANCE_MODEL, TOLERANCE_PROBE, run_self_test
from lamina.spec.quant import GgmlType
from support.cuda_emulated import EmulatedDevice
from support.tiny import write_tiny_llama

REPO = Path(__file__).parents[2]
FEW_TYPES = (GgmlType.F16, GgmlType.Q4_K)


@pytest.fixture
def few_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "PROBE_TYPES", FEW_TYPES)
    monkeypatch.setattr(self_test, "EXPERT_TYPES", (GgmlType.Q4_K,))


class CorruptedBackend(ReferenceBackend):
    """One matrix of the model lies wrong in memory: its rows are shifted by one."""

    def __init__(self, corrupted: int) -> None:
        super().__init__()
        self._corrupted = corrupted
        self._num_loaded = 0

    def load_weight(self, parts: Sequence[HostTensor], bias: object = None) -> Weight:
        weight = super().load_weight(parts, None)
        if self._num_loaded == self._corrupted:
            weight.storage.values[...] = np.roll(weight.storage.values, 1, axis=0)  # type: ignore[attr-defined]
        self._num_loaded += 1
        return weight


def _unavailable() -> Backend:
    raise Unsupported("no such card")


def test_random_matrices_are_sound() -> None:
    """Every type the self-test knows: finite, of mean about 0 and of ordinary size."""
    rng = np.random.default_rng(0)
    for kind in PROBE_TYPES:
        values = dequantize(HostTensor(kind, 64, 512, random_matrix(kind, 64, 512, rng)))
        assert np.isfinite(values).all(), kind
        assert abs(values.mean()) < 0.01, kind
        assert 0.03 < values.std() < 0.08, kind


@pytest.mark.usefixtures("few_types")
def test_good_devices_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """A-09: every instruction set of this CPU, and the reference, which differs by its 16-bit cache only."""
    devices: dict[str, Callable[[], Backend]] = {**cpu_variants(), "reference": ReferenceBackend}
    assert show_findings(run_self_test(devices, None), as_json=True) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [(f["device"], f["model"]) for f in findings] == [
        (name, f"random {kind}") for name in devices for kind in ("F16", "Q4_K", "Q4_K experts")
    ]
    for finding in findings:
        assert finding["ok"]
        assert finding["max_error"] <= finding["tolerance"] == TOLERANCE_PROBE
        if finding["device"] == "reference":
            assert 0 < finding["max_error"] < 1e-3


def test_an_emulated_card_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "PROBE_TYPES", (GgmlType.Q4_K,))
    monkeypatch.setattr(self_test, "EXPERT_TYPES", ())
    (finding,) = run_self_test({"cuda": lambda: CudaBackend(device=EmulatedDevice((8, 9)))}, None)
    assert finding.ok
    assert finding.kernel.startswith("int8 tensor cores")
    assert finding.max_error > 1e-3  # it did compute in 8 bits, not in the reference


@pytest.mark.parametrize("corrupted", range(6), ids=["embedding", "qkv", "output", "gate_up", "down", "head"])
def test_a_corrupted_layer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], corrupted: int
) -> None:
    """A-09: any of the model's matrices; the other devices are tried all the same, and the exit code says it."""
    monkeypatch.setattr(self_test, "PROBE_TYPES", (GgmlType.F16,))
    monkeypatch.setattr(self_test, "EXPERT_TYPES", ())
    devices: dict[str, Callable[[], Backend]] = {
        "bad": partial(CorruptedBackend, corrupted),
        "none": _unavailable,
        "good": ReferenceBackend,
    }
    assert show_findings(run_self_test(devices, None), as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["bad", "none", "good"]
    assert lines[1].endswith("FAILED")
    assert float(lines[1].split()[-3]) > 2 * TOLERANCE_PROBE
    assert lines[2].endswith("FAILED no such card")
    assert lines[3].endswith("ok")
    assert lines[4].startswith("1 of 3 ok")


def test_a_model_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits; of a model too large for the reference, the hidden state behind the layers that fit."""
    path = write_tiny_llama(tmp_path / "m.gguf", matrix_type=GGMLQuantizationType.Q8_0, layers=3)
    (finding,) = run_self_test({"reference": ReferenceBackend}, path)
    assert (finding.model, finding.tolerance) == ("tiny-llama-Q8_0", TOLERANCE_MODEL)
    assert finding.ok

    two_layers = 4 * (320 * 256 + 256 * (256 + 256 + 256 + 3 * 512) * 2 + 100)
    monkeypatch.setattr(self_test, "_budget_bytes", lambda: two_layers)
    (part,) = run_self_test({"bad": lambda: CorruptedBackend(4)}, path)
    assert part.model == "tiny-llama-Q8_0, layers 0-1"
    assert not part.ok


# What each generation of the field would run: compute dtype, and the kernels of 1, 8 and 512 rows and of attention.
GENERATIONS = {
    (6, 1): ("f32", "linear_dp4a", "linear_dp4a", "cuBLAS f32", "attention_plain", "attention_plain", "on trial"),
    (7, 5): ("f16", "linear_row", "linear_rows", "cuBLAS f16", "attention_plain", "attention_plain", "on"),
    (8, 9): ("bf16", "linear_row", "linear_rows", "cuBLAS bf16", "attention_few", "attention_many", "on"),
}


@pytest.mark.parametrize("cc", GENERATIONS)
def test_what_pascal_turing_and_ada_run(cc: tuple[int, int]) -> None:
    """A-01, C-13, on paper: asked of the planner that would run, of cards that are not here."""
    report = explain_device("cuda:0", lambda: CudaBackend(device=EmulatedDevice(cc)), None, "auto")
    dtype, one, eight, many, decode, prefill, graphs = GENERATIONS[cc]
    assert (report.compute_dtype, report.graphs) == (dtype, graphs)
    assert f"{cc[0]}.{cc[1]}" in report.graphs_why
    linear = {choice.rows: choice for choice in report.kernels if (choice.op, choice.operand) == ("linear", "Q4_K")}
    kernels = [choice.kernel for choice in linear.values()]
    assert (kernels[0], kernels[-2], kernels[-1]) == (one, eight, many)
    attention = {c.rows: c.kernel for c in report.kernels if (c.op, c.operand) == ("attention", "f16")}
    assert attention == {"decode": decode, "prefill": prefill}
    assert {c.operand for c in report.kernels if c.op == "linear"} >= {"Q4_0", "Q6_K", "F16", "IQ2_XS"}
    experts = {c.rows: c for c in report.kernels if (c.op, c.operand) == ("experts", "MXFP4")}
    if cc < (7, 5):
        assert [c.kernel for c in experts.values()] == ["expert_row"]
    else:
        assert [c.kernel for c in experts.values()] == ["expert_row", "expert_rows"]
    assert not any("planner's choice" in choice.why for choice in report.kernels)
    unpacked = next(c for c in report.kernels if c.operand == "IQ2_XS")
    assert unpacked.why.startswith("decoded to f32")
    if cc < (7, 5):
        assert "no int8 tensor cores before 7.5" in linear["1 to 8"].why
        assert "f16 runs at a 64th of its rate" in linear["9 and more"].why


def test_a_model_that_overflows_f16_is_explained(tmp_path: Path) -> None:
    """A-01: the dtype that the stage would take, the reason, and only the types that the model has."""
    path = write_tiny_llama(tmp_path / "m.gguf", matrix_type=GGMLQuantizationType.Q4_0, hidden=64, ff=96)
    types = read_types(path)
    plain = explain_device("cuda:0", lambda: CudaBackend(device=EmulatedDevice((7, 5))), types, "auto")
    assert (plain.compute_dtype, plain.compute_why) == ("f16", "the best that this device has")
    assert {choice.operand for choice in plain.kernels if choice.op == "linear"} == {"Q4_0"}
    object.__setattr__(types.spec, "architecture", "gemma3")
    wide = explain_device("cuda:0", lambda: CudaBackend(device=EmulatedDevice((7, 5))), types, "bf16")
    assert wide.compute_dtype == "f32"
    assert wide.compute_why == "f16, its fastest, is too narrow for gemma3 of width 64; it has no bf16"
    asked = explain_device("cuda:0", lambda: CudaBackend(device=EmulatedDevice((7, 5))), types, "f16")
    assert (asked.compute_dtype, asked.compute_why) == ("f16", "--compute-dtype asks for it")


def _run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rpc-worker", *options])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return int(ended.value.code or 0)


def test_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, few_types: None
) -> None:
    """Exit codes 0, 1 for a device that fails, 2 for a user's mistake; --json is JSON."""
    logged: list[dict[str, object]] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: logged.append(options))
    assert _run(monkeypatch, "--self-test", "--device", "reference") == 0
    assert "3 of 3 ok" in capsys.readouterr().out
    assert logged[0]["level"] == "WARNING"  # the table is not lost among the loader's lines
    assert _run(monkeypatch, "--self-test", "--device", "mock") == 1  # it computes nothing
    capsys.readouterr()
    path = write_tiny_llama(tmp_path / "m.gguf", matrix_type=GGMLQuantizationType.Q4_0, hidden=64, ff=96)
    assert _run(monkeypatch, "--explain", "--json", "--device", "cpu", "--model", str(path)) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["device"] == "cpu"
    assert _run(monkeypatch, "--explain", "--device", "reference", "--model", str(path)) == 0
    assert "large products in f32" in capsys.readouterr().out
    assert _run(monkeypatch, "--json") == 2
    assert "go with --self-test or --explain" in capsys.readouterr().err
    assert _run(monkeypatch, "--explain", "--model", str(tmp_path / "none.gguf")) == 2
    assert "none.gguf" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lamina.kernels.cuda.toolkit", None)
    assert _run(monkeypatch, "--explain", "--device", "cuda") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "lamina[cuda]" in line
