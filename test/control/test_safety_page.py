import re
import subprocess
import sys
from pathlib import Path

import pytest

from vla_ros.config import entries
from vla_ros.control.reasons import Level, Reason

TESTS = Path(__file__).parent
PAGE = (TESTS.parent.parent / "docs" / "safety.md").read_text(encoding="utf-8")
SECTIONS = {Level.STOP: "Reasons to stop", Level.HOLD: "Reasons to hold", Level.DROP: "Reasons to drop a message"}
CITATION = re.compile(r"`(test_\w+\.py)::(\w+)`")
COLLECT = """
import sys, pytest

class Causes:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            for marker in [] if item.get_closest_marker("xfail") else item.iter_markers("causes"):
                for reason in marker.args:
                    print(f"{item.path.name}::{item.originalname} {reason}")

sys.exit(pytest.main(["--collect-only", "-qq", sys.argv[1]], plugins=[Causes()]))
"""


def rows(level: Level) -> dict[str, str]:
    """Table rows of a section, by the reason in the first cell."""
    section = PAGE.split(f"## {SECTIONS[level]}\n")[1].split("\n## ")[0]
    return {row.split("`")[1]: row for row in section.splitlines() if row.startswith("| `")}


@pytest.fixture(scope="module")
def causes() -> str:
    """``file::test reason`` of every ``@pytest.mark.causes``, which test/node/conftest.py checks."""
    command = [sys.executable, "-c", COLLECT, str(TESTS.parent / "node")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.value)
def test_the_tables_have_every_reason_once_and_no_other(level: Level) -> None:
    assert list(rows(level)) == [reason.value for reason in Reason if reason.level is level]


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.value)
def test_every_reason_has_a_test_that_causes_it(reason: Reason, causes: str) -> None:
    cited = CITATION.findall(rows(reason.level)[reason.value])
    assert cited, f"{reason.value} names no test"
    for file, name in cited:
        assert f"{file}::{name} {reason.value}" in causes, "the test does not say that it causes the reason"


@pytest.mark.parametrize("section", ["States", "Limits on every command", "Transitions between chunks"])
def test_every_condition_has_a_test(section: str) -> None:
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = text.split("| Test |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) > 8
    assert [row for row in rows if not CITATION.search(row)] == []


def test_only_tables_name_tests() -> None:
    assert [line for line in PAGE.splitlines() if CITATION.search(line) and not line.startswith("| ")] == []


@pytest.mark.parametrize(("file", "name"), sorted(set(CITATION.findall(PAGE))))
def test_every_cited_test_exists(file: str, name: str) -> None:
    found = [path.read_text(encoding="utf-8") for path in TESTS.parent.rglob(file)]
    assert any(re.search(rf"^(def |class )?{name}\b", text, re.MULTILINE) for text in found)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`([a-z]+\.[a-z_]+)(?:: [a-z_]+)?`", PAGE))))
def test_every_mentioned_option_exists(option: str) -> None:
    assert option in entries()
