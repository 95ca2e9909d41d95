"""The benchmarks are scripts in a folder of their own; its modules are imported by their plain names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
