"""What holds for every test: one thread for numpy's BLAS (test machines are shared), the same examples in every run."""

import os
from functools import cache
from importlib.util import find_spec

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before anything loads numpy

import pytest
from hypothesis import settings

# No deadline: a busy machine would turn it into failures that say nothing.
settings.register_profile("lamina", deadline=None, derandomize=True)
settings.load_profile("lamina")


@cache
def has_gpu() -> bool:
    """Whether torch is installed and sees an NVIDIA GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
