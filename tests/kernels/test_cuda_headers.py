"""What ctypes is told of CUDA, against the headers of an installed toolkit; skipped where there is none."""

import ctypes
import re
import shutil
import site
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from lamina.kernels.cuda import card, compiler, cublas, driver, libcuda
from lamina.kernels.cuda.libcuda import Arguments

WIDTHS = {ctypes.c_void_p: 8, ctypes.c_ulonglong: 8, ctypes.c_size_t: 8, ctypes.c_ubyte: 1}
HANDLES = "CUcontext CUstream CUmodule CUfunction CUevent CUgraph CUgraphExec nvrtcProgram cublasHandle_t cudaStream_t"
WIDE = {*HANDLES.split(), "CUdeviceptr", "size_t", "unsigned long long", "cuuint64_t"}


def find_header(name: str) -> Path:
    """Of an installed toolkit, or of NVIDIA's wheels."""
    wheels = [Path(root) / "nvidia" for root in site.getsitepackages()]
    places = [*Path("/usr/local").glob("cuda*/include"), *(path for root in wheels for path in root.glob("*/include"))]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        pytest.skip(f"there is no {name}: no CUDA toolkit is installed")
    return found


def prototypes(header: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Parameters of each function, once for each of its declarations; what a name is defined as."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", find_header(header).read_text("utf-8", "replace"), flags=re.S)
    declared: dict[str, list[str]] = {}
    for name, parameters in re.findall(r"\b(\w+)\s*\(([^;{}()]*)\)\s*;", text):
        if "_v1" not in parameters:  # of a 32-bit driver, under the same name
            declared.setdefault(name, []).append(" ".join(parameters.split()))
    return declared, {new: name for name, new in re.findall(r"#\s*define\s+(\w+)\s+(?:__CUDA_API_\w+\()?(\w+)", text)}


def width_of(parameter: str) -> int:
    """Bytes; enumerations have four."""
    if "*" in parameter or "[" in parameter:
        return 8
    kind = parameter.replace("const ", "").strip().rsplit(" ", 1)[0]
    return 8 if kind in WIDE else 1 if kind == "unsigned char" else 4


@pytest.mark.parametrize(
    ("header", "arguments"),
    [("cuda.h", libcuda._ARGUMENTS), ("nvrtc.h", compiler._ARGUMENTS), ("cublas_api.h", cublas._ARGUMENTS)],
    ids=["driver", "nvrtc", "cublas"],
)
def test_functions_take_what_the_header_says(header: str, arguments: Arguments) -> None:
    declared, defined = prototypes(header)
    for name, types in arguments.items():
        wanted = [WIDTHS.get(kind, 4) for kind in types]
        found = declared.get(name) or declared[defined[name]]
        assert wanted in [[width_of(each) for each in parameters.split(",")] for parameters in found], (name, found)


def test_structures_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    config, attribute, copy = driver._LaunchConfig, driver._LaunchAttribute, driver._RowsCopy
    equal: Mapping[str, int] = {
        "sizeof(CUlaunchConfig)": ctypes.sizeof(config),
        "offsetof(CUlaunchConfig, hStream)": config.stream.offset,
        "offsetof(CUlaunchConfig, attrs)": config.attributes.offset,
        "offsetof(CUlaunchConfig, numAttrs)": config.num_attributes.offset,
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(attribute),
        "offsetof(CUlaunchAttribute, value)": attribute.value.offset,
        "sizeof(CUDA_MEMCPY2D)": ctypes.sizeof(copy),
        "offsetof(CUDA_MEMCPY2D, srcHost)": driver._Place.host.offset,
        "offsetof(CUDA_MEMCPY2D, srcDevice)": driver._Place.device.offset,
        "offsetof(CUDA_MEMCPY2D, srcPitch)": driver._Place.pitch.offset,
        "offsetof(CUDA_MEMCPY2D, dstXInBytes)": copy.target.offset,
        "offsetof(CUDA_MEMCPY2D, WidthInBytes)": copy.row_bytes.offset,
        "CUDA_ERROR_OUT_OF_MEMORY": libcuda._OUT_OF_MEMORY,
        "CUDA_ERROR_NOT_READY": driver._NOT_READY,
        "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": driver._PEER_ACCESS_ALREADY_ENABLED,
        "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": driver._CAPTURE_THREAD_LOCAL,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": driver._ATTRIBUTE_DEPENDENT_LAUNCH,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": driver._FUNCTION_MAX_DYNAMIC_SHARED,
        "CU_EVENT_DISABLE_TIMING": driver._EVENT_DISABLE_TIMING,
        "CU_MEMORYTYPE_HOST": driver._IN_HOST_MEMORY,
        "CU_MEMORYTYPE_DEVICE": driver._IN_DEVICE_MEMORY,
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": card._NUM_MULTIPROCESSORS,
        "CU_DEVICE_ATTRIBUTE_INTEGRATED": card._INTEGRATED,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": card._MAJOR,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": card._MINOR,
        "CU_STREAM_NON_BLOCKING": card._STREAM_NON_BLOCKING,
        "CUDA_ERROR_NO_DEVICE": card._NO_DEVICE,
    }
    asserts = "\n".join(f'_Static_assert({what} == {value}, "{what}");' for what, value in equal.items())
    source = tmp_path / "layout.c"
    source.write_text(f"#include <stddef.h>\n#include <cuda.h>\n{asserts}\n")
    compiler_of_c = shutil.which("cc") or shutil.which("gcc")
    if compiler_of_c is None:
        pytest.skip("no C compiler is installed")
    command = [compiler_of_c, "-fsyntax-only", f"-I{find_header('cuda.h').parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
