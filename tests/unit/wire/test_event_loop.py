"""What both programs do with their interpreter."""

import os
import subprocess
import sys

import pytest


def test_what_stays_is_left_out_of_collections() -> None:
    """Once; what comes later is collected as ever. In an interpreter of its own: there is no way back."""
    script = """
import gc, weakref
from lamina.wire.event_loop import leave_to_stay
class Node: pass
assert gc.get_freeze_count() == 0
leave_to_stay()
held = gc.get_freeze_count()
assert held > 1000, held
later = Node(); later.self = later; seen = weakref.ref(later); del later
leave_to_stay()
assert gc.get_freeze_count() == held
gc.collect()
assert seen() is None
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.skipif(os.name != "posix", reason="closes descriptors as a shell does")
@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
def test_closed_standard_streams_are_no_crash(closed: tuple[int, ...]) -> None:
    """As by `<&-` in a script that starts a worker: libuv would abort when the loop is closed."""
    script = """
import asyncio
from lamina.wire.event_loop import run
run(asyncio.sleep(0))
"""

    def close() -> None:
        for number in closed:
            os.close(number)

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, preexec_fn=close)
