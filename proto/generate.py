"""Regenerate the committed stubs: `python proto/generate.py` (needs the dev extra). CI proves that nothing changes."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def main() -> int:
    """Run protoc over every .proto of the package; 0 if it succeeded."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "lamina/v1").glob("*.proto"))]
    include = Path(protoc.__file__).parent / "_proto"
    outs = [f"--{kind}={ROOT}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    return protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outs, *files])


if __name__ == "__main__":
    sys.exit(main())
