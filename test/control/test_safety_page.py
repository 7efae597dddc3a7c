import re
from collections import defaultdict
from pathlib import Path

import pytest

from vla_ros.config import build, entries
from vla_ros.control.reasons import Level, Reason

TESTS = Path(__file__).parent
DOCS = TESTS.parent.parent / "docs"
PAGE = (DOCS / "safety.md").read_text(encoding="utf-8")
PAGES = PAGE + "".join((DOCS / f"{name}.md").read_text("utf-8") for name in ("guard", "collisions", "faults"))
SECTIONS = {
    Level.STOP: "Reasons to stop",
    Level.HOLD: "Reasons to hold",
    Level.COUNT: "Reasons that are only counted",
}
CITATION = re.compile(r"`(test_\w+\.py)::(\w+)`")


def rows(level: Level) -> dict[str, str]:
    """Table rows of a section, by the reason in the first cell."""
    section = PAGE.split(f"## {SECTIONS[level]}\n")[1].split("\n## ")[0]
    return {row.split("`")[1]: row for row in section.splitlines() if row.startswith("| `")}


@pytest.fixture(scope="module")
def causes(request: pytest.FixtureRequest) -> dict[str, set[tuple[str, str]]]:
    """Test and reason of every ``@pytest.mark.causes`` in this run, by file; test/node/conftest.py checks them."""
    found = defaultdict[str, set[tuple[str, str]]](set)
    for item in request.session.items:
        if item.path.parent.name in ("execution", "node", "person"):
            reasons = [] if item.get_closest_marker("xfail") else item.iter_markers("causes")
            found[item.path.name] |= {(item.originalname, reason) for each in reasons for reason in each.args}
    return found


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.value)
def test_the_tables_have_every_reason_once_and_no_other(level: Level) -> None:
    assert list(rows(level)) == [reason.value for reason in Reason if reason.level is level]


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.value)
def test_every_reason_has_a_test_that_causes_it(reason: Reason, causes: dict[str, set[tuple[str, str]]]) -> None:
    cited = CITATION.findall(rows(reason.level)[reason.value])
    assert cited, f"{reason.value} names no test"
    for file, name in cited:
        if file not in causes:
            pytest.skip("needs the tests of the node: they are checked where both are run")
        assert (name, reason.value) in causes[file], "the test does not say that it causes the reason"


@pytest.mark.parametrize("section", ["States", "Limits on every command", "Transitions between chunks"])
def test_every_condition_has_a_test(section: str) -> None:
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = text.split("| Test |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) > 8
    assert [row for row in rows if not CITATION.search(row)] == []


def test_only_tables_name_tests() -> None:
    assert [line for line in PAGES.splitlines() if CITATION.search(line) and not line.startswith("| ")] == []


@pytest.mark.parametrize(("file", "name"), sorted(set(CITATION.findall(PAGES))))
def test_every_cited_test_exists(file: str, name: str) -> None:
    found = [path.read_text(encoding="utf-8") for path in TESTS.parent.rglob(file)]
    assert any(re.search(rf"^(def |class )?{name}\b", text, re.MULTILINE) for text in found)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`([a-z]+\.[a-z_]+)(?:: [a-z_]+)?`", PAGES))))
def test_every_mentioned_option_exists(option: str) -> None:
    assert option in entries(build({"policy.name": "openvla"}, complete=False))
