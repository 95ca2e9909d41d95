"""What a process takes of the card and of the host."""

import os
from pathlib import Path

from lamina.kernels.cuda.card import Card
from lamina.kernels.cuda.libcuda import load_driver

MIB = 1 << 20


def used_bytes() -> int:
    """GPU memory of this very process by the driver's books; of all processes if it keeps none, as in containers."""
    import pynvml

    pynvml.nvmlInit()
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    mine = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
    if len(mine) == 1 and mine[0]:
        return int(mine[0])
    card = Card(load_driver(), 0)
    card.open()
    free, total = card.memory_bytes()
    return total - free


def resident_bytes() -> int:
    """Memory of this process on the host."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
