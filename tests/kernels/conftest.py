"""One `bench` per backend of the registry, so that every conformance test runs on each."""

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from support.backends import BACKENDS, BackendUnderTest, Bench, create_or_skip

_ENTRIES = [pytest.param(entry, id=name, marks=entry.marks) for name, entry in BACKENDS.items()]
_COMPUTING = [pytest.param(entry, id=name, marks=entry.marks) for name, entry in BACKENDS.items() if entry.compute]


def _bench(entry: BackendUnderTest, request: pytest.FixtureRequest) -> Iterator[Bench]:
    backend = create_or_skip(entry)
    yield Bench(backend, entry, np.random.default_rng(zlib.crc32(request.node.name.encode())))
    backend.close()


@pytest.fixture(params=_ENTRIES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Every backend: structure, memory, recording."""
    yield from _bench(request.param, request)


@pytest.fixture(params=_COMPUTING)
def computing(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Every backend whose ops compute: numbers."""
    yield from _bench(request.param, request)
