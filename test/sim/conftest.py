"""One world for all tests that only need a fresh episode: MuJoCo and the renderer are made once."""

from collections.abc import Iterator

import pytest

pytest.importorskip("mujoco", reason="the library mujoco is not installed (extra 'sim')")

from vla_ros.sim.world import TableTop


@pytest.fixture(scope="session")
def shared_world() -> Iterator[TableTop]:
    with TableTop() as world:
        yield world


@pytest.fixture
def world(shared_world: TableTop) -> TableTop:
    shared_world.reset(0)
    return shared_world
