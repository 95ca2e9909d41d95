"""Which implementation serves a device name, and what is said when none can."""

import sys

import pytest

from lamina.kernels import registry
from lamina.kernels.backend import Backend, GraphMode, Unsupported
from lamina.kernels.mock import MockBackend
from lamina.kernels.reference import ReferenceBackend
from lamina.kernels.registry import Candidate, DeviceRequest, create_backend, select_backend
from lamina.spec.errors import InvalidConfig


def test_named_implementations() -> None:
    """reference and mock are devices of their own; a memory limit reaches them."""
    assert isinstance(create_backend("reference"), ReferenceBackend)
    mock = create_backend("mock", max_memory_bytes=1234)
    assert isinstance(mock, MockBackend)
    assert mock.device_facts().total_bytes == 1234


def test_a_better_candidate_that_fails_is_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU without the native library is served by the reference; one line says why, in the log at the latest."""

    def fail(request: DeviceRequest) -> Backend:
        raise Unsupported(f"no library\nfor {request.threads} threads")

    candidates = [c for c in registry._CANDIDATES if c.implementation == "reference"]
    native = Candidate("cpu", "native", 9, fail)
    monkeypatch.setattr(registry, "_CANDIDATES", (*candidates, native))
    selection = select_backend("cpu", threads=3)
    assert isinstance(selection.backend, ReferenceBackend)
    assert selection.explain() == "cpu: reference (numpy float32); not native: no library for 3 threads"
    assert caplog.messages == []
    assert isinstance(create_backend("cpu", threads=3), ReferenceBackend)
    assert caplog.messages == [selection.explain()]


def test_nothing_is_said_of_the_best(caplog: pytest.LogCaptureFixture) -> None:
    create_backend("reference")
    assert caplog.messages == []


def test_the_highest_priority_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order in the table is no matter; the request carries the index of the device."""
    requests: list[DeviceRequest] = []

    def build(request: DeviceRequest) -> Backend:
        requests.append(request)
        return MockBackend()

    slow = Candidate("cuda", "slow", 0, lambda _: ReferenceBackend())
    monkeypatch.setattr(registry, "_CANDIDATES", (slow, Candidate("cuda", "fast", 5, build)))
    selection = select_backend("cuda:3", max_memory_bytes=7, graphs=GraphMode.OFF)
    assert (selection.implementation, selection.passed_over) == ("fast", ())
    assert requests == [DeviceRequest(3, None, 7, GraphMode.OFF)]


def test_no_candidate_is_unsupported_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the device and every reason."""

    def fail(request: DeviceRequest) -> Backend:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(registry, "_CANDIDATES", (Candidate("cuda", "cuda", 0, fail),))
    with pytest.raises(Unsupported, match=r"cuda:1 cannot be served here \(cuda: No module named 'cuda'\)"):
        select_backend("cuda:1")


@pytest.mark.parametrize("device", ["gpu", "cpu:1", "cuda:", "cuda:x", "cuda:-1", "", "mock:0"])
def test_unknown_devices_are_refused(device: str) -> None:
    """A-18: the message lists what there is."""
    with pytest.raises(InvalidConfig, match="cpu, cuda, mock, reference"):
        select_backend(device)


def test_a_card_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lamina.kernels.cuda.toolkit", None)
    with pytest.raises(Unsupported, match=r"device cuda cannot be served.*pip install 'lamina\[cuda\]'"):
        select_backend("cuda")
