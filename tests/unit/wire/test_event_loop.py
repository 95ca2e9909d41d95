"""What both programs do with their interpreter."""

import subprocess
import sys


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
