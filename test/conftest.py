"""Settings of the whole suite, and its behaviour under a Python without the required libraries.

`colcon test` runs pytest with colcon's own Python, which may lack the libraries (Ubuntu's does). Then the Python of
the active virtual environment takes over; without one, the run fails with the reason. Files and folders whose
optional libraries are missing are skipped, and a run in which every test is skipped fails.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from _pytest.reports import CollectReport  # pytest.CollectReport from pytest 7 on

NEEDED = ("numpy", "yaml", "rich", "PIL", "simplejpeg", "cv2", "pinocchio")
PYTEST = tuple(map(int, pytest.__version__.split(".")[:2]))


@cache
def lacks(module: str) -> bool:
    return importlib.util.find_spec(module) is None


MISSING = [*filter(lacks, NEEDED), *(["pytest 7"] if PYTEST < (7, 0) else [])]
HERE = Path(__file__).parent
FREEZE = gc.freeze
FREE = 4
"""Gigabytes that a run on several workers needs in its folder: a checkpoint with full vision towers takes three."""
IGNORED: dict[str, str] = {}  # folders that pytest 7 cannot skip, and why

if PYTEST < (8, 3):  # makes up a package for each folder, or takes Python's own package `test`
    folders = sys.modules["test"] = types.ModuleType("test")
    folders.__path__ = [str(HERE)]


def pytest_plugin_registered(manager: pytest.PytestPluginManager) -> None:
    """Restart with the active environment's Python before another conftest.py imports a missing library."""
    active = os.environ.get("VIRTUAL_ENV", "")
    python = Path(active) / "bin" / "python"
    if MISSING and active and Path(sys.prefix).resolve() != Path(active).resolve() and python.exists():
        capture = manager.getplugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
        os.execv(python, [str(python), "-m", "pytest", *sys.argv[1:]])


def pytest_addoption(parser: pytest.Parser) -> None:
    if lacks("pytest_timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed")
    if PYTEST < (7, 0):
        parser.addini("pythonpath", "of pytest 7")
    if PYTEST < (7, 3):
        parser.addini("tmp_path_retention_policy", "of pytest 7.3")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a whole run on a full disk, where tests would fail without naming it."""
    folder = Path(config.option.basetemp or tempfile.gettempdir()).absolute()
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e9
    if free < FREE and getattr(config.option, "numprocesses", None):
        said = f"{folder}: found {free:.1f} GB free, expected {FREE} GB for the files of the tests"
        raise pytest.UsageError(f"{said}: free some, or set TMPDIR to a folder on another disk")
    if lacks("pytest_timeout"):
        config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")
    if MISSING:
        config.args[:] = [__file__]  # nothing else could be imported
    elif not lacks("hypothesis"):
        load_profile()
    # Shells start background jobs with SIGINT ignored. Processes that tests start must not inherit this.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def load_profile() -> None:
    """Let properties pass on a busy machine, and use the same examples in every CI run."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", settings.get_profile("suite"), derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "suite")


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> CollectReport | None:
    """Fail without the required libraries; skip a file that imports hypothesis where that is missing."""
    if not isinstance(collector, pytest.Module):
        return None
    if MISSING:
        reason = f"{sys.executable} has no {', '.join(MISSING)}; activate the environment that has them"
        return CollectReport(collector.nodeid, "failed", reason, [])
    if lacks("hypothesis") and re.search(r"^from hypothesis", collector.path.read_text("utf-8"), re.MULTILINE):
        reason = "Skipped: the library hypothesis is not installed (extra 'dev')"
        return CollectReport(collector.nodeid, "skipped", (str(collector.path), 1, reason), [])
    return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what other workers run, and folders whose conftest.py skips: pytest 7 would skip the whole run."""
    if _is_of_others(collection_path):
        return True
    conftest = collection_path / "conftest.py"
    if PYTEST >= (8, 0) or not conftest.exists():
        return None
    needed = re.findall(r'^pytest.importorskip\("(\w+)"', conftest.read_text("utf-8"), re.MULTILINE)
    missing = [*filter(lacks, needed)]
    if missing:
        IGNORED[collection_path.name] = ", ".join(missing)
    return bool(missing) or None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for folder, libraries in sorted(IGNORED.items()):
        terminalreporter.write_line(f"not run: test/.../{folder}: {libraries} not installed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which every test was skipped."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    skipped = reporter is not None and reporter.stats.get("skipped")
    if session.exitstatus == 0 and skipped and not any(map(reporter.stats.get, ("passed", "xfailed"))):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


ONE_BY_ONE = {
    "nodes": ("serve", "test_security", *(f"node/test_{letter}" for letter in "pqrstuvwxyz")),
    "consoles": (
        *("console", "execution/test_gripper_goals", "execution/test_outputs", "person/test_takeover_node"),
        *(f"node/test_{letter}" for letter in "abcdefghijklmno"),
    ),
    "real time": ("tools/faults", "commission/test_commission", "graph", "replay", "ros"),
    "training": tuple(f"training/test_{name}" for name in ("six_commands", "bad_data", "trainer")),
    "lockstep": ("sim",),
}
"""Tests that one worker runs one after another: three groups of running nodes and servers, which mostly wait,
training in processes that share their imports, and simulations that wait for their node."""
OWNERS = {"gw1": "consoles", "gw2": "real time", "gw0": "nodes"}
"""Workers that begin with a group, and import no more; the others run the rest, and so does HELPER afterwards."""
HELPER = "gw0"
LONGEST = (
    *("engine/test_kernels", "policies/openvla/test_golden", "training/test_view", "tools/test_docs_check"),
    *("policies/openvla/test_demo_checkpoint", "eval", "tools/train", "training", "cli"),
    *("engine/test_token_engine", "policies/pi/test_wire", "benchmarks", "policies/test_ranks", "guard"),
)
"""What takes longest of the rest, as measured; the rest begins with it, so that no worker ends with it alone."""
APART = ("engine/test_kernels.py", "policies/openvla/test_demo_checkpoint.py")
"""Files whose tests take minutes and share nothing: each may run on another worker."""


def _is_of_others(path: Path) -> bool:
    """Whether other workers run all tests of a file or folder; one that replaces a crashed worker runs any."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if count <= len(OWNERS) or int(worker[2:]) >= count or HERE not in path.parents:
        return False
    place, own = path.relative_to(HERE).as_posix(), OWNERS.get(worker)
    owned = {group for group in OWNERS.values() if place.startswith(ONE_BY_ONE[group])}
    if own and not owned and worker != HELPER:
        return not any(room.startswith(f"{place}/") for room in ONE_BY_ONE[own])
    return bool(owned) and own not in owned


def pytest_runtest_logstart(nodeid: str) -> None:
    """Lower the priority of workers that only compute, in favour of those that run nodes."""
    if "PYTEST_XDIST_WORKER" in os.environ and _worker(nodeid) not in OWNERS.values() and os.nice(0) == 0:
        os.nice(10)


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later search for garbage, and search less often.

    Nodes, servers and policies search when they start or end, and nodes unfreeze everything when they end.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keep out what a file of tests imported, too."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        FREEZE()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with running nodes and with what takes long, so that no worker ends long after the others."""
    items.sort(key=lambda item: _rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep a file's tests, and those of a group, on one worker, which has collected them."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _worker(nodeid)

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            self.registered_collections[node] = list(collection)

        def schedule(self) -> None:
            if self.collection is None:
                self.collection = [*dict.fromkeys(chain(*self.registered_collections.values()))]
                for nodeid in sorted(self.collection, key=_rank):
                    self.workqueue.setdefault(_worker(nodeid), {})[nodeid] = False
                config.pluginmanager.getplugin("session").testscollected = len(self.collection)  # 100 %
            for node in self.nodes * 2:  # as many tests as a worker asks for
                self._reschedule(node)

        def _reschedule(self, node: Any) -> None:
            known = self.registered_collections.get(node)
            if known is None or node.shutting_down or self._pending_of(self.assigned_work[node]) > 2:
                return
            unit = next((unit for unit, tests in self.workqueue.items() if next(iter(tests)) in known), None)
            if unit is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(unit, last=False)
            self._assign_work_unit(node)

    return Scheduling(config, log)


def _rank(nodeid: str) -> int:
    """Return a test's place in the order of units."""
    place, order = nodeid.partition("/")[2], [*chain(*ONE_BY_ONE.values(), LONGEST)]
    return next((rank for rank, rooms in enumerate(order) if place.startswith(rooms)), len(order))


def _worker(nodeid: str) -> str:
    """Return the group of a test, its file, or the test itself: what one worker runs."""
    file = nodeid.partition("::")[0]
    place = file.partition("/")[2]
    if place.startswith(APART):
        return nodeid
    return next((group for group, rooms in ONE_BY_ONE.items() if place.startswith(rooms)), file)
