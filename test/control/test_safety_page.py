"""docs/safety.md has every reason and every option that it names, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vla_ros.config import entries
from vla_ros.control.reasons import Level, Reason

TESTS = Path(__file__).parent
PAGE = (TESTS.parent.parent / "docs" / "safety.md").read_text(encoding="utf-8")
SECTIONS = {Level.STOP: "Reasons to stop", Level.HOLD: "Reasons to hold", Level.DROP: "Reasons to drop a message"}


def rows(level: Level) -> dict[str, str]:
    """Table rows of a section by the reason in their first cell."""
    section = PAGE.split(f"## {SECTIONS[level]}\n")[1].split("\n## ")[0]
    return {row.split("`")[1]: row for row in section.splitlines() if row.startswith("| `")}


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.value)
def test_the_tables_have_every_reason_once_and_no_other(level: Level) -> None:
    assert list(rows(level)) == [reason.value for reason in Reason if reason.level is level]


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.value)
def test_every_reason_has_a_test_that_exists(reason: Reason) -> None:
    found = re.findall(r"`(test_\w+\.py)::(\w+)`", rows(reason.level)[reason.value])
    assert found, f"{reason.value} names no test"


@pytest.mark.parametrize(("file", "name"), sorted(set(re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE))))
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    found = [path.read_text(encoding="utf-8") for path in TESTS.parent.rglob(file)]
    assert any(re.search(rf"^(def |class )?{name}\b", text, re.MULTILINE) for text in found)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`([a-z]+\.[a-z_]+)(?:: [a-z_]+)?`", PAGE))))
def test_every_option_that_is_named_exists(option: str) -> None:
    assert option in entries()
