"""Fixtures shared by all tests: worlds of ranks, and one thread a process, so that no result depends on the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests import worlds

settings.register_profile("onecopy", deadline=None)  # how long an example takes says something of the machine only
settings.load_profile("onecopy")


@pytest.fixture(scope="session", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    worlds.stop_all()


@pytest.fixture(scope="session")
def world() -> Callable[[int], worlds.World]:
    """`world(n).run(function, *arguments)` calls a top-level function on n gloo ranks."""
    return worlds.world


@pytest.fixture(scope="session")
def world1() -> worlds.World:
    """One rank."""
    return worlds.world(1)


@pytest.fixture(scope="session")
def world2() -> worlds.World:
    """Two ranks."""
    return worlds.world(2)


@pytest.fixture(scope="session")
def world3() -> worlds.World:
    """Three ranks."""
    return worlds.world(3)


@pytest.fixture(scope="session")
def world4() -> worlds.World:
    """Four ranks."""
    return worlds.world(4)
