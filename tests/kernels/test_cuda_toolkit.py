"""Where a worker's CUDA libraries come from, and what is said where they are not."""

import ctypes
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lamina.kernels.backend import Unsupported
from lamina.kernels.registry import present_devices
from support.cuda_fakes import FakeDriver

MODULE = "lamina.kernels.cuda.toolkit"


class NotFoundError(RuntimeError):
    pass


@pytest.fixture
def pathfinder(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A cuda-pathfinder that finds nothing."""

    def find(name: str) -> SimpleNamespace:
        raise NotFoundError(name)

    module = ModuleType("cuda.pathfinder")
    module.load_nvidia_dynamic_lib = find  # type: ignore[attr-defined]
    module.DynamicLibNotFoundError = NotFoundError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)
    before = sys.modules.pop(MODULE, None)
    yield module
    sys.modules.pop(MODULE, None)
    if before is not None:
        sys.modules[MODULE] = before


@pytest.fixture
def toolkit(pathfinder: ModuleType) -> Any:
    return import_module(MODULE)


def no_driver() -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


def test_a_machine_without_a_driver(toolkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no cards to list, and says why none can be opened."""
    monkeypatch.setattr(toolkit, "load_driver", no_driver)
    assert present_devices() == ("cpu",)
    with pytest.raises(Unsupported, match=r"there is no NVIDIA driver: libcuda\.so\.1"):
        toolkit.load_libraries()


def test_a_machine_with_cards_and_no_toolkit(toolkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cards are listed, and the refusal says what to install."""
    monkeypatch.setattr(toolkit, "load_driver", lambda: FakeDriver((9, 0), (8, 9)))
    assert present_devices() == ("cpu", "cuda:0", "cuda:1")
    with pytest.raises(Unsupported, match=r"CUDA's nvrtc is not installed; pip install 'lamina\[cuda\]'"):
        toolkit.load_libraries()


def test_without_the_extra_no_card_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert present_devices() == ("cpu",)


def test_the_compilers_builtins_are_loaded_before_it_looks_for_them(
    toolkit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVRTC opens them by name alone, which finds nothing in a wheel."""
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcublas.so.13"):
        (tmp_path / name).touch()
    loaded: list[str] = []

    def load(path: str) -> SimpleNamespace:
        loaded.append(Path(path).name)
        return SimpleNamespace()

    find = lambda name: SimpleNamespace(abs_path=str(tmp_path / f"lib{name}.so.13"))  # noqa: E731
    monkeypatch.setattr(toolkit, "load_nvidia_dynamic_lib", find)
    monkeypatch.setattr(toolkit, "load_driver", lambda: "driver")
    monkeypatch.setattr(ctypes, "CDLL", load)
    for module in (toolkit.compiler, toolkit.cublas):
        monkeypatch.setattr(module, "declared", lambda library: library)
    assert toolkit.load_libraries().driver == "driver"
    assert loaded == ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13", "libcublas.so.13"]


@pytest.mark.parametrize(("cache_home", "folder"), [("/var/cache/me", "/var/cache/me"), ("", "~/.cache")])
def test_where_compiled_kernels_are_kept(
    toolkit: Any, monkeypatch: pytest.MonkeyPatch, cache_home: str, folder: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    assert toolkit.kernel_folder() == Path(folder).expanduser() / "lamina/cuda"
