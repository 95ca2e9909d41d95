"""What holds for every test: one thread for numpy's BLAS, since test machines are shared. Set before numpy is loaded."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
