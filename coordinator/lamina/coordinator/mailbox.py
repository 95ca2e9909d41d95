"""What one task of the loop leaves for one other."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items in order, for one reader; putting never waits.

    An asyncio.Queue, which may be bounded and have many readers, costs twice as much, which every token would pay.
    """

    __slots__ = ("_waiter", "items")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()  # that wait; the reader may take from it directly
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """One more, at the end."""
        self.items.append(item)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def get(self) -> Item:
        """The first; waits for it. One task at a time."""
        while not self.items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.items.popleft()
