"""What holds for every test: one thread for numpy's BLAS, since test machines are shared; set before numpy loads."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
