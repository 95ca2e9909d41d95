"""Finding and loading liblamina_cpu, and choosing the instruction set it runs with.

Owns the search order and the C signatures. Knows nothing of buffers, ops or the Backend interface.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lamina
from lamina.kernels.backend import Unsupported
from lamina.kernels.cpu.descriptors import ABI_VERSION, ExpertArgs, Isa, KvDesc, OpDesc, PackedPart, ReplayReport
from lamina.spec.errors import InvalidConfig

ISA_VARIABLE = "LAMINA_CPU_ISA"
LIBRARY_VARIABLE = "LAMINA_CPU_LIBRARY"

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "lamina_abi_version": (c_uint32, []),
    "lamina_op_desc_bytes": (c_size_t, []),
    "lamina_isa_works": (c_int, [c_int]),
    "lamina_allocate": (c_void_p, [c_size_t]),
    "lamina_release": (None, [c_void_p, c_size_t]),
    "lamina_team_create": (c_void_p, [c_int, c_int, c_int]),
    "lamina_team_destroy": (None, [c_void_p]),
    "lamina_team_num_threads": (c_int, [c_void_p]),
    "lamina_team_pin_caller": (None, [c_void_p]),
    "lamina_team_reserve": (c_int, [c_void_p, c_size_t, c_size_t]),
    "lamina_team_scratch_bytes": (c_size_t, [c_void_p]),
    "lamina_replay": (c_int, [c_void_p, POINTER(OpDesc), c_int, c_int, c_int, c_int, c_int, POINTER(ReplayReport)]),
    "lamina_linear_supports": (c_int, [c_int, c_int]),
    "lamina_packed_bytes": (c_size_t, [c_int, c_int, c_int64, c_int64]),
    "lamina_linear_scratch_bytes": (c_size_t, [c_int, c_int, c_int, c_int]),
    "lamina_pack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(PackedPart)]),
    "lamina_unpack_row": (None, [c_int, POINTER(PackedPart), c_int64, c_float, c_void_p]),
    "lamina_attention_own_bytes": (c_size_t, [c_int, c_int]),
    "lamina_sample_own_bytes": (c_size_t, [c_int]),
    "lamina_attention_shared_bytes": (c_size_t, [c_int, c_int, c_int, c_int]),
    "lamina_experts_own_bytes": (c_size_t, [c_int, POINTER(ExpertArgs), c_int]),
    "lamina_kv_supports": (c_int, [c_int, c_int, c_int]),
    "lamina_kv_block_bytes": (c_int64, [c_int, c_int, c_int, c_int]),
    "lamina_kv_read": (None, [POINTER(KvDesc), c_void_p, c_int, c_void_p, c_void_p]),
}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library and the file it came from."""

    path: Path
    functions: ctypes.CDLL


@cache
def load_library() -> NativeLibrary:
    """The native library of this installation.

    Searched: the file that LAMINA_CPU_LIBRARY names, then beside this module, then in every portion of the `lamina`
    namespace (editable installs put it elsewhere than the sources). Raises Unsupported if there is none or it does not
    fit this version of the package; InvalidConfig if that is so of a file that was named.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        try:
            return _open(Path(named))
        except Unsupported as error:
            raise InvalidConfig(f"{LIBRARY_VARIABLE}: {error}, or unset the variable") from None
    candidates = list(_candidates())
    for path in candidates:
        if path.is_file():
            return _open(path)
    searched = ", ".join(str(path.parent) for path in candidates)
    raise Unsupported(f"the native CPU library is not built (searched {searched}); install lamina with a C++ compiler")


def _candidates() -> Iterator[Path]:
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    name = f"{'' if sys.platform == 'win32' else 'lib'}lamina_cpu{suffix}"
    yield Path(__file__).parent / name
    for portion in lamina.__path__:
        yield Path(portion) / "kernels" / "cpu" / name


def _open(path: Path) -> NativeLibrary:
    try:
        functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unsupported(f"{path} cannot be loaded ({error}); reinstall lamina") from None
    found = (functions.lamina_abi_version(), functions.lamina_op_desc_bytes())
    if found != (ABI_VERSION, ctypes.sizeof(OpDesc)):
        raise Unsupported(
            f"{path} has ABI {found}, this package needs {(ABI_VERSION, ctypes.sizeof(OpDesc))}; reinstall lamina"
        )
    return NativeLibrary(path, functions)


@cache
def working_isas() -> tuple[Isa, ...]:
    """The instruction sets that were executed successfully here, best first."""
    works = load_library().functions.lamina_isa_works
    return tuple(isa for isa in sorted(Isa, reverse=True) if works(isa))


def choose_isa(wanted: str | None) -> Isa:
    """The best working instruction set, or the one `wanted` names ("scalar", "avx2", "avx512", "amx", "neon").

    Raises InvalidConfig for another name, or for a set that this machine or build cannot run.
    """
    working = working_isas()
    if not wanted:
        return working[0]
    names = {isa.name.lower(): isa for isa in Isa}
    if wanted.lower() not in names:
        raise InvalidConfig(f"{ISA_VARIABLE}={wanted} is none of {', '.join(names)}")
    isa = names[wanted.lower()]
    if isa not in working:
        able = ", ".join(each.name.lower() for each in working)
        raise InvalidConfig(f"{ISA_VARIABLE}={wanted} cannot run on this {platform.machine()} (it runs {able})")
    return isa
