"""deploy/install.py over a pip that is played: a line for every stage, errors and exit code as they are."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAID = """\
Obtaining file:///lamina
  Installing build dependencies: started
  Installing build dependencies: finished with status 'done'
  Preparing editable metadata (pyproject.toml): started
Processing /somewhere/numpy-2.4.6.whl (from lamina==0.1.0)
Collecting grpcio<2 (from lamina==0.1.0)
  Downloading grpcio-1.85.3.whl (7.4 MB)
Building wheels for collected packages: lamina
  Building editable for lamina (pyproject.toml): started
  Building editable for lamina (pyproject.toml): still running...
Successfully built lamina
Installing collected packages: numpy, grpcio, lamina
Successfully installed numpy-2.4.6 grpcio-1.85.3 lamina-0.1.0
"""


def run(tmp_path: Path, code: int) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "pip.py").write_text(
        f"import sys\nprint({SAID!r}, end='')\nprint('said', *sys.argv[1:], file=sys.stderr)\nsys.exit({code})\n"
    )
    command = [sys.executable, str(ROOT / "deploy/install.py"), "--editable", "."]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )


def test_a_line_for_every_stage(tmp_path: Path) -> None:
    result = run(tmp_path, 0)
    assert result.returncode == 0
    assert [re.sub(r"^ +\d+ s: ", "", line) for line in result.stdout.splitlines()] == [
        "fetching what builds the native library …",
        "fetching packages …",
        "building the native library, a minute or two …",
        "installing the packages …",
        "done",
    ]


def test_a_failure_is_pips_own(tmp_path: Path) -> None:
    result = run(tmp_path, 3)
    assert result.returncode == 3
    assert "done" not in result.stdout
    assert result.stderr == "said install --progress-bar off --editable .\n"
