"""`pip install` with a line for every stage, since pip itself says either nothing for minutes or hundreds of lines.

Standard library only. Errors and warnings are pip's own; so is the exit code.
"""

import os
import subprocess
import sys
import time

# How pip's lines begin, and what it does then; the first two are one for each package.
_STAGES = {
    "Collecting ": "fetching packages",
    "Processing ": "fetching packages",
    "Installing build dependencies": "fetching what builds the native library",
    "Building ": "building the native library, a minute or two",
    "Installing collected packages": "installing the packages",
}


def stage_of(line: str) -> str | None:
    """The stage that a line of pip's begins or goes on with, None for lines that say nothing of it."""
    return next((stage for start, stage in _STAGES.items() if line.lstrip().startswith(start)), None)


def install(arguments: list[str]) -> int:
    """Run `pip install` with these arguments; its exit code."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    started_s, shown = time.monotonic(), ""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if (stage := stage_of(line)) not in (None, shown):
                shown = stage or ""
                print(f"  {time.monotonic() - started_s:3.0f} s: {stage} …", flush=True)
    if pip.returncode == 0:
        print(f"  {time.monotonic() - started_s:3.0f} s: done", flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
