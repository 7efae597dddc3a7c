"""The comparison of distilled checkpoints: what is a pair."""

from typing import Any

import pytest

from benchmarks import distilled
from benchmarks.distilled import Libero, compared, name_of, table
from vla_ros_lab.eval.results import Score, to_json


def test_an_episode_of_libero_with_an_error_is_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [Score("a task", 0, True), Score("a task", 1, None, "the simulator died"), Score("a task", 2, False)]
    asked = list[tuple[str, ...]]()

    def run_command(*words: str) -> dict[str, Any]:
        asked.append(words)
        return to_json(scores, "libero_spatial", {"mode": "sync"})

    monkeypatch.setattr(distilled, "run_command", run_command)
    place = Libero(7, 40, (), "PY", (3,))
    assert place.blocks() == [(7, 3), (8, 3)]
    found = place.run(("live", 100.0), "DIR", (8, 3))
    assert found == {"3 8 0": True, "3 8 2": False}
    assert place.first((8, 3)) in found
    words = asked[0]
    assert words[words.index("--seed") + 1] == "8"
    assert words[words.index("--delay-ms") + 1] == "100.0"


def test_only_episodes_of_both_count() -> None:
    first, second = {"a": True, "b": True, "c": False}, {"a": False, "c": True, "d": False}
    assert compared(first, second)[0] == "1 and 1"


def test_a_cell_that_was_not_run_is_in_the_table() -> None:
    cells = [("sync", 0.0), ("live", 200.0)]
    lines = table({name_of(cells[0], "T"): {"a": True}}, cells, ["T", "S"]).splitlines()
    assert lines[2].startswith("| sync | T | 1 of 1 |")
    assert lines[5].startswith("| live, 200 ms | S | 0 of 0 |")
