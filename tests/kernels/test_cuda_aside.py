"""What runs beside the main stream keeps the order that its scratch memory demands: a simulated card executes the calls
of both streams in every legal order, and no product may ever read what was not filled for it."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from lamina.kernels.cuda.aside import Aside
from lamina.kernels.cuda.driver import Driver

MAIN, BESIDE = 0x10, 0x20


class Card:
    """Two streams as queues of operations; events as the position that was recorded last. Nothing runs until asked."""

    def __init__(self) -> None:
        self.queues: dict[int, list[tuple[str, Any]]] = {MAIN: [], BESIDE: []}
        self.recorded: dict[int, int] = {}  # by event: how often it was recorded
        self._events = count(1)

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        event._obj.value = next(self._events)
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:  # noqa: N802
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        number = self.recorded[event.value] = self.recorded.get(event.value, 0) + 1
        self.queues[stream.value].append(("record", (event.value, number)))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        assert event.value in self.recorded, "an event that was never recorded orders nothing"
        self.queues[stream.value].append(("follow", (event.value, self.recorded[event.value])))
        return 0

    def push(self, stream: int, kind: str, what: Any) -> None:
        self.queues[stream].append((kind, what))

    def run(self, rng: random.Random) -> Iterator[tuple[str, Any]]:
        """All operations in one of the orders that streams and events allow."""
        at = {MAIN: 0, BESIDE: 0}
        done: set[tuple[int, int]] = set()
        while any(at[stream] < len(queue) for stream, queue in self.queues.items()):
            ready = [
                stream
                for stream, queue in self.queues.items()
                if at[stream] < len(queue) and (queue[at[stream]][0] != "follow" or queue[at[stream]][1] in done)
            ]
            assert ready, "the streams wait for each other"
            stream = rng.choice(ready)
            kind, what = self.queues[stream][at[stream]]
            at[stream] += 1
            if kind == "record":
                done.add(what)
            elif kind != "follow":
                yield kind, what


def _aside(card: Card) -> Aside:
    return Aside(Driver(card, MAIN, dependent_launch=False), Driver(card, BESIDE, dependent_launch=False))


def _fill(card: Card, aside: Aside, scratch: int, value: int, weights: int) -> None:
    driver = aside.begin_filling(scratch)
    assert driver._stream.value == BESIDE
    card.push(BESIDE, "fill", (scratch, value, weights))
    aside.end_filling(scratch)


def _read(card: Card, aside: Aside, scratch: int, value: int) -> None:
    aside.begin_reading(scratch)
    card.push(MAIN, "read", (scratch, value))
    aside.end_reading(scratch)


@pytest.mark.parametrize("seed", range(200))
def test_no_product_reads_what_was_not_filled_for_it(seed: int) -> None:
    """B-10: products of one or two pieces, some of weights that need no decoding, uploads of new weights in between."""
    rng = random.Random(seed)
    card = Card()
    aside = _aside(card)
    weights = 0
    for step in range(12):
        if rng.random() < 0.2:
            weights += 1
            card.push(MAIN, "upload", weights)
            aside.join()
        if rng.random() < 0.2:
            _read(card, aside, 0x9000, 0)  # of memory that is nobody's scratch
        _fill(card, aside, 0x1000 + step % 2, step, weights)
        for _ in range(rng.randint(1, 2)):
            _read(card, aside, 0x1000 + step % 2, step)
    held: dict[int, int] = {0x9000: 0}
    uploaded = 0
    for kind, what in card.run(random.Random(-seed)):
        match kind, what:
            case "upload", number:
                uploaded = number
            case "fill", (scratch, value, wanted):
                assert uploaded == wanted, "decoded before the weights were there"
                held[scratch] = value
            case "read", (scratch, value):
                assert held.get(scratch) == value
    assert uploaded == weights


def test_filling_overlaps_the_product_before() -> None:
    """The point of it: the second slice may be filled before the first product has run."""
    card = Card()
    aside = _aside(card)
    for step in range(3):
        _fill(card, aside, 0x1000 + step % 2, step, 0)
        _read(card, aside, 0x1000 + step % 2, step)
    orders = {tuple(what for _, what in card.run(random.Random(seed))) for seed in range(50)}
    assert any(order.index((0x1001, 1, 0)) < order.index((0x1000, 0)) for order in orders)
    assert all(order.index((0x1000, 2, 0)) > order.index((0x1000, 0)) for order in orders)


def test_a_graph_of_both_streams_parts_what_comes_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """B-09: only events of the capture are waited for in it, and none of them after it or after a launch."""
    card = Card()
    aside = _aside(card)
    launched: list[str] = []

    class Graph:
        def launch(self) -> None:
            launched.append("graph")

        def destroy(self) -> None:
            launched.append("destroy")

    def capture(driver: Driver, launch_all: Any) -> Graph:
        before = dict(card.recorded)
        for queue in card.queues.values():
            queue.clear()
        launch_all()
        waits = [what for queue in card.queues.values() for kind, what in queue if kind == "follow"]
        assert waits
        assert all(number > before.get(event, 0) for event, number in waits)
        for queue in card.queues.values():
            queue.clear()
        return Graph()

    monkeypatch.setattr(Driver, "capture", capture)

    def step() -> None:
        _fill(card, aside, 0x1000, 1, 0)
        _read(card, aside, 0x1000, 1)

    step()
    graph = aside.capture(step)
    graph.launch()
    after = dict(card.recorded)
    step()
    waits = [what for queue in card.queues.values() for kind, what in queue if kind == "follow"]
    assert waits
    assert all(number > after.get(event, 0) for event, number in waits)
    graph.destroy()
    assert launched == ["graph", "destroy"]
