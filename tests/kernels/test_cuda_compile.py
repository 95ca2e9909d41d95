"""Every CUDA source compiles for the oldest and the newest kind of card that the installed toolkit knows.

With LAMINA_TEST_ALL_GPUS set, for every generation in between as well, which takes minutes.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lamina.kernels.cuda.compiler import Nvrtc, Source, declared
from lamina.kernels.cuda.formats import PACKED_FORMATS
from lamina.kernels.cuda.policy import compile_target
from lamina.kernels.cuda.programs import SIGNATURES, Program, program, source_text

ARCHITECTURES = (75, 80, 86, 89, 90, 120) if os.environ.get("LAMINA_TEST_ALL_GPUS") else (75, 90)
LINEAR = {"FORMAT": "Q4_K", "FORMAT_B": "Q6_K", "MAX_WARPS": 8, "MIN_BLOCKS": 2}

PROGRAMS = (
    program("linear_row.cu", "linear", **LINEAR),
    program("linear_row.cu", "linear", FORMAT="Q6_K", GROUPS=2, MAX_WARPS=24, MIN_BLOCKS=1),
    program("linear_rows.cu", "linear", COLUMN_TILES=2, **LINEAR),
    program("linear_dp4a.cu", "linear", COLUMNS=2, **LINEAR),
    program("experts.cu", "route"),
    program("expert_row.cu", "expert_gated", USES_DP4A=0, **LINEAR),
    program("expert_row.cu", "expert_gated", USES_DP4A=1, **LINEAR),
    program("expert_rows.cu", "expert_gated", COLUMN_TILES=2, **LINEAR),
    program("expert_dense.cu", "expert_gated"),
    program("dequantise.cu", "dequantise", FORMAT="Q5_K"),
    program("repack.cu", "repack", FORMAT="Q3_K"),
    program("repack.cu", "repack", FORMAT="Q6_K"),
    program("dense.cu", "linear", ELEMENT=2, COLUMNS=4),
    program("rows.cu", "finish"),
    program("sample.cu", "sample"),
    program("attention_few.cu", "attend_few", KV_TYPE=1, KEY_DIM=64, VALUE_DIM=64),
    program("attention_few.cu", "attend_few", KV_TYPE=3, KEY_DIM=128, VALUE_DIM=128),
    program("attention_many.cu", "attend_many", KV_TYPE=2, KEY_DIM=80, VALUE_DIM=80),
    program("attention_many.cu", "attend_many", KV_TYPE=3, KEY_DIM=64, VALUE_DIM=64),
    program("attention_plain.cu", "attend_plain", MAX_DIM=512),
    program("attention_wgmma.cu", "attend_wgmma", KV_TYPE=1, KEY_DIM=128, VALUE_DIM=128),
    program("attention_wgmma.cu", "attend_wgmma", KV_TYPE=2, KEY_DIM=64, VALUE_DIM=64),
)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda entry: f"{entry.file}-{dict(entry.defines).get('KV_TYPE', 0)}")
def test_compiles_for_old_and_new_cards(entry: Program, tmp_path: Path) -> None:
    """C-02: one source for all; no include is needed that a run-time compiler might not find."""
    source = tmp_path / "kernel.cu"
    source.write_text(source_text(entry.file), "utf-8")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    options = ["-std=c++17", "-fatbin", "--threads=2", "-Werror=all-warnings", "-diag-suppress=177"]
    command = ["nvcc", *options, *targets, *entry.options, "-o", str(tmp_path / "kernel.fatbin"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "kernel.fatbin").stat().st_size > 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("kv_type", "dim"), [(1, 64), (2, 64), (1, 128), (2, 128)])
def test_warpgroup_products_keep_their_registers(kv_type: int, dim: int, tmp_path: Path) -> None:
    """What only sm_90a has: nothing spills, and no product waits for another because the compiler could not tell."""
    entry = program("attention_wgmma.cu", "attend_wgmma", KV_TYPE=kv_type, KEY_DIM=dim, VALUE_DIM=dim)
    source = tmp_path / "kernel.cu"
    source.write_text(source_text(entry.file), "utf-8")
    options = ["-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-diag-suppress=177"]
    command = ["nvcc", *options, *entry.options, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "0 bytes spill stores, 0 bytes spill loads" in result.stderr
    assert "Performance Loss" not in result.stderr, result.stderr


@pytest.mark.parametrize("file", sorted({file for file, _ in SIGNATURES}))
def test_every_entry_point_has_a_signature(file: str) -> None:
    """A kernel is launched with as many arguments as it takes, of which none may be missing from the table."""
    pattern = r"^KERNEL\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)"
    declared = re.findall(pattern, source_text(file), re.M)
    assert {name for name, _ in declared} == {name for f, name in SIGNATURES if f == file}
    for name, parameters in declared:
        assert len(parameters.split(",")) == len(SIGNATURES[file, name]), name


def test_units_are_as_large_as_the_sources_say() -> None:
    """The sizes of the packed formats stand in two languages: they must agree."""
    text = source_text("dequantise.cu")
    for fmt in PACKED_FORMATS.values():
        struct = re.search(rf"struct {fmt.name}\b[^{{]*\{{", text)
        assert struct is not None
        base = re.search(r": (\w+)<(\d+)>", struct[0])
        if base is None:
            size = re.search(r"UNIT_BYTES = (\d+)", text[struct.end() :])
            assert size is not None
            assert int(size[1]) == fmt.unit_bytes
        else:
            scales = re.search(rf"struct {base[1]} \{{.*?UNIT_BYTES = CODE_BYTES \+ (\d+)", text, re.S)
            assert scales is not None
            assert int(base[2]) + int(scales[1]) == fmt.unit_bytes


def _nvrtc() -> Nvrtc | None:
    """The run-time compiler of CUDA 12 from its wheel; that of CUDA 13 no longer knows these cards."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("lib/libnvrtc.so.12")]
    return Nvrtc(declared(ctypes.CDLL(str(found[0])))) if found else None


AT_RUN_TIME = [(entry, cc) for entry in PROGRAMS for cc in ((6, 1), (7, 0))]
AT_RUN_TIME += [(entry, (9, 0)) for entry in PROGRAMS if entry.file == "attention_wgmma.cu"]


@pytest.mark.parametrize(("entry", "cc"), AT_RUN_TIME, ids=lambda value: getattr(value, "file", str(value)))
def test_compiles_at_run_time(entry: Program, cc: tuple[int, int]) -> None:
    """C-02: the compiler of workers, as they use it: for cards that CUDA 13 no longer knows; for what one card has."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("needs the wheel nvidia-cuda-nvrtc-cu12")
    source = Source(entry.file, source_text(entry.file), entry.options)
    assert nvrtc.compile(source, compile_target(cc, nvrtc.capabilities)).startswith(b"\x7fELF")


def test_a_card_of_the_future_gets_ptx() -> None:
    """The driver translates it for cards that the compiler does not know."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("needs the wheel nvidia-cuda-nvrtc-cu12")
    target = compile_target((99, 0), nvrtc.capabilities)
    code = nvrtc.compile(Source("rows.cu", source_text("rows.cu"), ()), target)
    assert f".target sm_{target.removeprefix('compute_')}".encode() in code
    assert code.endswith(b"\0"), "the driver reads PTX up to a zero byte"
