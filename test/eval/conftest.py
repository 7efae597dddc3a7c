"""The world of the tests of the simulation."""

from test.sim.conftest import own_traffic, shared_world, world

__all__ = ["own_traffic", "shared_world", "world"]
