"""What holds for every test: one thread for numpy's BLAS (test machines are shared), the same examples in every run."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before anything loads numpy

from hypothesis import settings

# No deadline: a busy machine would turn it into failures that say nothing.
settings.register_profile("lamina", deadline=None, derandomize=True)
settings.load_profile("lamina")
