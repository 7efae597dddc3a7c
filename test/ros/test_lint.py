import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 is sourced")

pytestmark = pytest.mark.ros

ROOT = Path(__file__).parents[2]
CODE = ("src", "launch", "setup.py", "benchmarks", "fuzz", "tools")
IGNORED = ("D102", "D103", "D105", "D107", "D402", "D403")
LINTERS = {
    "ament_flake8": ("--config", "setup.cfg", *CODE, "test"),
    # D105, D107: magic methods and constructors. D402 takes a name before a parenthesis for a signature, and D403
    # MuJoCo, RouDi and NaN for misspelt words.
    "ament_pep257": ("--convention", "google", *CODE, "--add-ignore", *IGNORED),
    "ament_lint_cmake": (".",),
}


@pytest.mark.parametrize("name", LINTERS)
def test_clean(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    result = subprocess.run(
        [name, *LINTERS[name]], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    output = result.stdout + result.stderr
    if "ModuleNotFoundError" in output:
        pytest.skip(f"{name} lacks a library: {output.splitlines()[-1]}")
    assert result.returncode == 0 or "No files found" in output, output[-4000:]


def test_package_xml_is_of_format_3() -> None:
    pytest.importorskip("catkin_pkg", reason="catkin_pkg is not installed")
    from catkin_pkg.package import parse_package

    warnings: list[str] = []
    package = parse_package(str(ROOT / "package.xml"), warnings=warnings)
    package.validate(warnings=warnings)
    assert not warnings
    assert (package.name, package.package_format, package.licenses) == ("vla_ros", 3, ["Apache-2.0"])


def _imported() -> set[str]:
    found: set[str] = set()
    for folder in ("src", "launch"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return found


def test_package_xml_names_the_ros_packages_that_are_imported() -> None:
    pytest.importorskip("catkin_pkg", reason="catkin_pkg is not installed")
    from catkin_pkg.package import parse_package

    index = "share/ament_index/resource_index/packages"
    prefixes = [Path(prefix) for prefix in os.environ["AMENT_PREFIX_PATH"].split(os.pathsep)]
    packages = {file.name for prefix in prefixes for file in (prefix / index).glob("*")} - {"vla_ros"}
    named = {dependency.name for dependency in parse_package(str(ROOT / "package.xml")).exec_depends}
    assert _imported() & packages <= named
    assert "rclpy" in _imported() & packages
