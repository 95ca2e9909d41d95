"""The loop that both programs run on."""

import asyncio

import pytest

from lamina.wire.event_loop import run


def test_the_result_and_the_error_of_the_main_task_come_back() -> None:
    async def doubled(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    async def failing() -> None:
        raise ValueError("as asyncio.run would")

    assert run(doubled(21)) == 42
    with pytest.raises(ValueError, match=r"as asyncio\.run would"):
        run(failing())


def test_it_is_uvloop_where_that_is_installed() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert isinstance(run(loop()), uvloop.Loop)
