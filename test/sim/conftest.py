"""A world shared by all tests that only need a fresh episode."""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("mujoco", reason="the library mujoco is not installed (extra 'sim')")

from vla_ros_lab.sim.world import TableTop


@pytest.fixture(scope="session", autouse=True)
def own_traffic() -> Iterator[None]:
    """Isolate this run from another one on the same host that chose the same ROS domain."""
    tag = f"<Tag>vla_ros_sim_{os.getpid()}</Tag>"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain><Discovery>{tag}</Discovery></Domain></CycloneDDS>")
        yield


@pytest.fixture(scope="session")
def shared_world() -> Iterator[TableTop]:
    with TableTop() as world:
        yield world


@pytest.fixture
def world(shared_world: TableTop) -> TableTop:
    shared_world.reset(0)
    return shared_world
