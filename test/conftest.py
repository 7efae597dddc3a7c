"""Settings of the whole suite, and what happens where a Python runs it that lacks something.

`colcon test` runs pytest with colcon's own Python, which need not be the one that has the libraries (Ubuntu's is
not): the active virtual environment's goes on then, and without one the suite is skipped with the reason.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from _pytest.reports import CollectReport  # pytest.CollectReport from pytest 7 on

NEEDED = ("numpy", "yaml", "rich", "PIL", "simplejpeg", "cv2", "pinocchio", "hypothesis", "pytest_timeout")
LACKING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
PYTEST = tuple(map(int, pytest.__version__.split(".")[:2]))
if PYTEST < (8, 3):
    LACKING.append("pytest 8.3")


def pytest_plugin_registered(manager: pytest.PytestPluginManager) -> None:
    """Go on with the active environment's Python before another conftest.py imports what this one lacks."""
    active = os.environ.get("VIRTUAL_ENV", "")
    python = Path(active) / "bin" / "python"
    if LACKING and active and Path(sys.prefix).resolve() != Path(active).resolve() and python.exists():
        capture = manager.getplugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
        os.execv(python, [str(python), "-m", "pytest", *sys.argv[1:]])


def pytest_addoption(parser: pytest.Parser) -> None:
    if "pytest_timeout" in LACKING:
        parser.addini("timeout", "of pytest-timeout, which is not installed")
    if PYTEST < (7, 0):
        parser.addini("pythonpath", "of pytest 7")


def pytest_configure(config: pytest.Config) -> None:
    if LACKING:
        config.args[:] = [__file__]  # nothing else could be imported
    else:
        load_profile()
    # A shell starts background jobs with SIGINT ignored, and children inherit that: what tests start must hear it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def load_profile() -> None:
    """Let a busy machine be no failure of a property, and CI look at the same examples each time."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", settings.get_profile("suite"), derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "suite")


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> CollectReport | None:
    """Say why the suite is skipped."""
    if not LACKING or not isinstance(collector, pytest.Module):
        return None
    reason = f"{sys.executable} has no {', '.join(LACKING)}; activate the environment that has them"
    return CollectReport(collector.nodeid, "skipped", (__file__, 1, f"Skipped: {reason}"), [])


REAL_TIME = ("graph", "node", "replay", "ros", "serve", "tools/faults", "test_security.py")
"""Tests of running nodes: one worker runs them one after another, the others all that only computes."""
LOCKSTEP = ("sim",)
"""Tests in which a simulation waits for its node: one worker at a time runs them, too."""


def pytest_runtest_logstart(nodeid: str) -> None:
    """Let workers that only compute give way to the one that runs nodes, which mostly waits."""
    if "PYTEST_XDIST_WORKER" in os.environ and _worker(nodeid) != "real time" and os.nice(0) == 0:
        os.nice(10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with running nodes and with slow files, so that no worker ends long after the others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = {"real time": 0, "lockstep": 1}
    items.sort(key=lambda item: (order.get(_worker(item.nodeid), 2), item.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep a file's tests, all in real time, and all in lockstep, on one worker each."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _worker(nodeid)

    return Scheduling(config, log)


def _worker(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    place = file.partition("/")[2]
    return "real time" if place.startswith(REAL_TIME) else "lockstep" if place.startswith(LOCKSTEP) else file
