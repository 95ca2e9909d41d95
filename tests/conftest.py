"""What holds for every test: one thread for numpy's BLAS (test machines are shared), the same examples in every run."""

import os
from collections.abc import Iterator
from functools import cache

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before anything loads numpy

import pytest
from hypothesis import settings

from lamina.kernels.registry import present_devices

# No deadline: a busy machine would turn it into failures that say nothing.
settings.register_profile("lamina", deadline=None, derandomize=True)
settings.load_profile("lamina")


@cache
def has_gpu() -> bool:
    """Whether the `cuda` extra is installed and the driver shows a GPU."""
    return len(present_devices()) > 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


# What LAMINA_REQUIRE names must be there: a skip for its sake is then a failure, so that CI cannot be green without it.
_LACKS = {"native": ("native library is not built", "native CPU library is not built"), "chromium": ("no Chromium",)}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Turn skips for a required thing's sake into failures."""
    outcome = yield
    report = outcome.get_result()
    required = [word for word in os.environ.get("LAMINA_REQUIRE", "").split(",") if word]
    reason = str(report.longrepr)
    if report.skipped and any(lack in reason for word in required for lack in _LACKS[word]):
        report.outcome = "failed"
