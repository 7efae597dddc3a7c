"""How the suite behaves where libraries are missing, as for `colcon test` after an installation for a robot."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden = sys.argv.pop(1).split(",")
sys.meta_path.insert(0, Hidden())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find(name, package)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
"""Runs pytest as if the libraries named first were not installed."""


@pytest.fixture
def suite(tmp_path: Path):
    """Run files of the suite without some libraries; return the status, the output and the counts of the report."""

    def run(libraries: str, *files: str) -> tuple[int, str, dict[str, int]]:
        report = tmp_path / "report.xml"
        command = [sys.executable, "-c", WITHOUT, libraries, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        variables = {name: os.environ[name] for name in os.environ.keys() - {"VIRTUAL_ENV", "PYTEST_ADDOPTS"}}
        if "pytest_timeout" in libraries:
            variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        done = subprocess.run(
            [*command, *files], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False
        )
        [counts] = ElementTree.parse(report).getroot()
        wanted = ("tests", "errors", "failures", "skipped")
        return done.returncode, done.stdout + done.stderr, {name: int(counts.get(name, -1)) for name in wanted}

    return run


def test_without_hypothesis_and_pytest_timeout_the_rest_runs(suite) -> None:
    """The files that need them are skipped with the reason."""
    status, output, counts = suite("hypothesis,pytest_timeout", "test/config", "test/middleware/test_selection.py")
    assert status == 0, output
    assert counts["tests"] > 20
    assert counts["skipped"] == 1
    assert re.search(r"SKIPPED.*test_loading.py.*: the library hypothesis is not installed \(extra 'dev'\)", output)


def test_without_what_the_package_requires_the_run_fails_and_says_why(suite) -> None:
    """`colcon test-result` reads the report: a skipped suite would be green."""
    status, output, counts = suite("pinocchio,simplejpeg", "test/config")
    assert status != 0
    assert counts["errors"] == 1
    assert "has no simplejpeg, pinocchio; activate the environment that has them" in output


def test_a_run_in_which_everything_is_skipped_fails(suite) -> None:
    status, output, counts = suite("rclpy", "test/ros/test_doctor.py")
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED, output
    assert counts["skipped"] == 1
    assert "no ROS 2 is sourced" in output


def test_a_disk_that_is_nearly_full_is_named_before_the_first_test() -> None:
    pytest.importorskip("xdist", reason="the library pytest-xdist is not installed (extra 'dev')")
    full = "import pytest, shutil; shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(9e9, 8e9, 1e9)"
    command = [sys.executable, "-c", f"{full}; pytest.main(['-n', '2', 'test/config'])"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert "found 1.0 GB free, expected 4 GB" in done.stderr
    assert "created: 2/2 workers" not in done.stdout
