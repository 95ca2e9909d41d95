"""The CUDA sources as programs: which file, which entry point, which definitions, and the types of the arguments.

Owns the text of the sources (includes resolved, so that no compiler needs a search path) and the packing of arguments.
Knows no device.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')

# One letter a value, as in `struct`: P address, i int, f float. A group of several letters is a struct passed by value.
_ACTIVATIONS = "PPPiii"
_PART = "PPiiii"
_LINEAR = (_PART, _PART, "PPPPiiii")
_ATTENTION = "P" * 11 + "i" * 8 + "ff"
_HEADS = "Pii"
_MATRICES = "PPPii"
_SELECTION = "PPiiiP"
_INPUTS = "PPii"

SIGNATURES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("linear_row.cu", "linear"): (*_LINEAR, "Piif", _ACTIVATIONS + "PP"),
    ("linear_rows.cu", "linear"): _LINEAR,
    ("linear_dp4a.cu", "linear"): _LINEAR,
    ("repack.cu", "repack"): (*"PPPiii",),
    ("dequantise.cu", "dequantise"): (*"PPiiiiiii",),
    ("dequantise.cu", "embed"): (*"PPPPiiiiiiif",),
    ("dense.cu", "linear"): (*"PiiPiiPPiiP",),
    ("dense.cu", "convert"): (*"PiPiii",),
    ("dense.cu", "embed"): (*"PiPPPiiiiif",),
    ("rows.cu", "set_shape"): (*"Piii",),
    ("rows.cu", "copy_words"): (*"PPi",),
    ("rows.cu", "prepare"): (*"PiP", _ACTIVATIONS),
    ("rows.cu", "rms_norm"): (*"PiPPiifP", _ACTIVATIONS),
    ("rows.cu", "rms_norm_groups"): (*"PiPPiiifP",),
    ("rows.cu", "rope_and_store"): (_HEADS, _HEADS, _HEADS, "PPiif", "PPPiii", "i", "P"),
    ("rows.cu", "store_q8"): (_HEADS, _HEADS, "PPPiii", "i", "P"),
    ("rows.cu", "finish"): (*"PiPPiiiiP", _ACTIVATIONS),
    ("rows.cu", "add"): (*"PiPiPiiP",),
    ("rows.cu", "softcap"): (*"PiifP",),
    ("rows.cu", "gather_rows"): (*"PiPPiiP",),
    ("rows.cu", "argmax"): (*"PiiPiPP",),
    ("sample.cu", "sample"): (*"PiiPiPiP",),
    ("experts.cu", "route"): (*"PiiPiPiiiiffP",),
    ("experts.cu", "bin"): (_SELECTION, *"iiiiPPPP"),
    ("experts.cu", "prepare_pairs"): (*"PiiiiPP", _ACTIVATIONS),
    ("experts.cu", "combine"): ("PPiii", _MATRICES, _SELECTION, *"Piii"),
    ("expert_row.cu", "expert_gated"): (_MATRICES, _MATRICES, _SELECTION, _INPUTS, *"Piiii"),
    ("expert_row.cu", "expert_linear"): (_MATRICES, _SELECTION, _INPUTS, *"Piiii"),
    ("expert_rows.cu", "expert_gated"): (_MATRICES, _MATRICES, "PPP", _INPUTS, *"Piiii"),
    ("expert_rows.cu", "expert_linear"): (_MATRICES, "PPP", _INPUTS, "P"),
    ("expert_dense.cu", "expert_gated"): (_MATRICES, _MATRICES, _SELECTION, *"iiiPiiPii"),
    ("expert_dense.cu", "expert_linear"): (_MATRICES, _SELECTION, *"iiPiiPii"),
    ("attention_few.cu", "attend_few"): (_ATTENTION, _ACTIVATIONS),
    ("attention_many.cu", "attend_many"): (_ATTENTION, _ACTIVATIONS),
    ("attention_wgmma.cu", "attend_wgmma"): (_ATTENTION, _ACTIVATIONS),
    ("attention_plain.cu", "attend_plain"): (_ATTENTION, *"iiiP"),
}


@dataclass(frozen=True, slots=True)
class Program:
    """One entry point of one source under its definitions."""

    file: str
    function: str
    defines: tuple[tuple[str, str | int], ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options of the definitions."""
        return tuple(f"-D{name}={value}" for name, value in self.defines)


def program(file: str, function: str, **defines: str | int) -> Program:
    """A Program with its definitions by keyword, in a fixed order."""
    return Program(file, function, tuple(sorted(defines.items())))


@cache
def source_text(file: str) -> str:
    """A source as a compiler takes it."""
    return assemble(file, {})


def assemble(file: str, substitutes: Mapping[str, str]) -> str:
    """A source with its own includes in place, each once; `substitutes` are texts to take instead of included files."""
    included: set[str] = set()

    def include(match: re.Match[str]) -> str:
        if match[1] in included:
            return ""
        included.add(match[1])
        return substitutes[match[1]] if match[1] in substitutes else expand(match[1])

    def expand(name: str) -> str:
        return _INCLUDE.sub(include, (files("lamina.kernels.cuda") / "src" / name).read_text("utf-8"))

    return expand(file)


class Packing:
    """Lays arguments out as a kernel expects them: each parameter aligned to 8 bytes, structs as C has them."""

    def __init__(self, signature: tuple[str, ...]) -> None:
        sizes = [struct.calcsize(f"@{group}0P") for group in signature]
        self.offsets = tuple(accumulate(sizes[:-1], initial=0))
        self.num_bytes = sum(sizes)
        self._struct = struct.Struct("@" + "".join(f"{group}0P" for group in signature))

    def pack_into(self, target: bytearray | memoryview, values: tuple[int | float, ...]) -> None:
        """Write all values, structs flattened, addresses as ints (0: null). Raises struct.error if they do not fit."""
        self._struct.pack_into(target, 0, *values)


@cache
def packing_of(file: str, function: str) -> Packing:
    """The packing of an entry point's arguments."""
    return Packing(SIGNATURES[file, function])
