"""Where the real model of the tests lies. `make test` fetches it first, so a missing file is a failure, not a skip."""

import os
from pathlib import Path

_REPO_ROOT = Path(__file__).resolve().parents[2]
_SMOLLM2_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """LAMINA_TEST_MODEL if it is set, else the file in models/. Raises FileNotFoundError."""
    path = Path(os.environ.get("LAMINA_TEST_MODEL") or _REPO_ROOT / "models" / _SMOLLM2_NAME)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the test model is missing; run `make models` or set LAMINA_TEST_MODEL")
    return path
