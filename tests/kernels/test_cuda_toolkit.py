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


def library_at(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    """What the linker finds, under any name; an exception where it finds nothing of use."""

    def load(path: str) -> Any:
        if isinstance(library, OSError):
            raise library
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (OSError("libcuda.so.1: cannot open shared object file"), r"there is no NVIDIA driver: libcuda\.so\.1"),
        (OSError("/usr/lib/libcuda.so.1: file too short"), "there is no NVIDIA driver: .*too short"),
        (
            SimpleNamespace(cuInit=SimpleNamespace()),
            r"driver is too old; install 525 .*\(it has no cuDriverGetVersion\)",
        ),
    ],
    ids=["none", "an empty file", "of long ago"],
)
def test_a_machine_without_a_driver_of_use(
    toolkit: Any, monkeypatch: pytest.MonkeyPatch, library: Any, said: str
) -> None:
    """It has no cards to list, and says why none can be opened."""
    library_at(monkeypatch, library)
    assert present_devices() == ("cpu",)
    with pytest.raises(Unsupported, match=said):
        toolkit.load_libraries()


@pytest.mark.parametrize(("version", "extra"), [(13000, "cuda"), (12040, "cuda12")])
def test_a_machine_with_cards_and_no_toolkit(
    toolkit: Any, monkeypatch: pytest.MonkeyPatch, version: int, extra: str
) -> None:
    """The cards are listed, and the refusal says what to install for such a driver."""
    monkeypatch.setattr(toolkit, "load_driver", lambda: FakeDriver((9, 0), (8, 9), version=version))
    assert present_devices() == ("cpu", "cuda:0", "cuda:1")
    with pytest.raises(Unsupported, match=rf"CUDA's nvrtc is not installed; pip install 'lamina\[{extra}\]'"):
        toolkit.load_libraries()


def test_a_toolkit_that_is_broken(
    pathfinder: ModuleType, toolkit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half an installation, or one of another machine: which file it is, on one line."""

    def fail(name: str) -> SimpleNamespace:
        raise RuntimeError(f"Failed to dlopen lib{name}.so")  # as cuda-pathfinder puts it

    monkeypatch.setattr(toolkit, "load_driver", lambda: FakeDriver((9, 0)))
    monkeypatch.setattr(toolkit, "load_nvidia_dynamic_lib", fail)
    with pytest.raises(Unsupported, match=r"CUDA's nvrtc cannot be loaded, install it again: .*libnvrtc\.so"):
        toolkit.load_libraries()
    find = lambda name: SimpleNamespace(abs_path=str(tmp_path / f"lib{name}.so"))  # noqa: E731
    monkeypatch.setattr(toolkit, "load_nvidia_dynamic_lib", find)
    library_at(monkeypatch, OSError(f"{tmp_path}/libnvrtc.so: invalid ELF header"))
    with pytest.raises(Unsupported, match=r"install it again: .*libnvrtc\.so: invalid ELF header"):
        toolkit.load_libraries()
    library_at(monkeypatch, SimpleNamespace(nvrtcVersion=SimpleNamespace()))
    with pytest.raises(Unsupported, match=r"libnvrtc is too old; CUDA 12\.4 .*\(it has no nvrtcGetNum"):
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
    driver = FakeDriver((9, 0))
    monkeypatch.setattr(toolkit, "load_driver", lambda: driver)
    monkeypatch.setattr(ctypes, "CDLL", load)
    for module in (toolkit.compiler, toolkit.cublas):
        monkeypatch.setattr(module, "declared", lambda library: library)
    assert toolkit.load_libraries().driver is driver
    assert loaded == ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13", "libcublas.so.13"]


@pytest.mark.parametrize(("cache_home", "folder"), [("/var/cache/me", "/var/cache/me"), ("", "~/.cache")])
def test_where_compiled_kernels_are_kept(
    toolkit: Any, monkeypatch: pytest.MonkeyPatch, cache_home: str, folder: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    assert toolkit.kernel_folder() == Path(folder).expanduser() / "lamina/cuda"


def test_a_user_without_a_home(toolkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number: the worker says what to set."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(Unsupported, match="this user has no home; set XDG_CACHE_HOME"):
        toolkit.kernel_folder()
