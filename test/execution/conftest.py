"""The robot, and the node that moves it, of test/node."""

from ..node.conftest import inside, pytest_runtest_call, robot, start

__all__ = ["inside", "pytest_runtest_call", "robot", "start"]
