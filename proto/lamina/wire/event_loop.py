"""The event loop that coordinator and worker run on."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
_new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None  # asyncio's own

with suppress(ImportError):  # there is none for Windows
    from uvloop import new_event_loop

    _new_loop = new_event_loop


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop: a message through gRPC wakes a loop several times, which is a fifth cheaper there."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)
