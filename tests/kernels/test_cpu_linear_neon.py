"""The NEON kernels, cross-compiled and run in an emulator: linears give the bits of the portable ones, with and without
dotprod, the other ops nearly so.

Takes minutes, so it runs only when LAMINA_TEST_EMULATED=1 asks for it.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "kernels" / "native"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
ISA_NEON = "3"

pytestmark = [
    pytest.mark.skipif(os.environ.get("LAMINA_TEST_EMULATED") != "1", reason="LAMINA_TEST_EMULATED is not 1"),
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason=f"needs {COMPILER} and {EMULATOR}"
    ),
]


def _compile(sources: list[Path], target: Path, *flags: str) -> None:
    command = [COMPILER, "-std=c++20", "-O0", "-ffp-contract=off", "-DLAMINA_HAVE_NEON=1", "-w", f"-I{NATIVE}/include"]
    subprocess.run([*command, *flags, *map(str, sources), "-o", str(target)], check=True)


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything but the NEON kernels, linked into one relocatable object."""
    target = tmp_path_factory.mktemp("neon") / "common.o"
    sources = [NATIVE / "linear" / f"{name}.cpp" for name in ("linear", "pack", "unpack", "isa_scalar")]
    _compile([ROOT / "tests" / "support" / "linear_self_check.cpp", *sources], target, "-r", "-nostdlib")
    return target


@pytest.mark.parametrize(
    ("march", "cpu"), [("armv8.2-a+dotprod", "max"), ("armv8-a", "cortex-a72")], ids=["dotprod", "baseline"]
)
def test_neon_gives_the_bits_of_the_portable_kernels(tmp_path: Path, common: Path, march: str, cpu: str) -> None:
    """Every type, odd shapes, few and many rows; the program exits with 0 when nothing differs."""
    neon = tmp_path / "isa_neon.o"
    _compile([NATIVE / "linear" / "isa_neon.cpp"], neon, "-c", f"-march={march}")
    program = tmp_path / "check"
    _compile([common, neon], program, "-static")
    result = subprocess.run(
        [EMULATOR, "-cpu", cpu, str(program), ISA_NEON], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.timeout(600)
def test_neon_ops_agree_with_the_portable_ones(tmp_path: Path) -> None:
    """Norm, rotation, attention over every KV dtype, softcap, argmax and sampling; 0 when no error is too large."""
    portable = tmp_path / "portable.o"
    sources = [
        path
        for folder in ("src", "linear")
        for path in sorted((NATIVE / folder).glob("*.cpp"))
        if not path.stem.endswith(("_avx2", "_avx512", "_amx", "_neon"))
    ]
    include = f"-I{NATIVE / 'src'}"
    _compile([ROOT / "tests" / "support" / "ops_self_check.cpp", *sources], portable, include, "-O1", "-r", "-nostdlib")
    objects = [portable]
    for source in sorted(NATIVE.glob("*/*_neon.cpp")):
        objects.append(tmp_path / f"{source.stem}.o")
        _compile([source], objects[-1], include, "-O1", "-c", "-march=armv8.2-a+dotprod+fp16")
    program = tmp_path / "check"
    _compile(objects, program, "-static", "-pthread")
    result = subprocess.run(
        [EMULATOR, "-cpu", "max", str(program), ISA_NEON], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("attention") == 12
