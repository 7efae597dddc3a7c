import argparse
from pathlib import Path

import pytest

from tools.train.controls import CONTROLS, chosen, markdown, summarize
from tools.train.evaluate import words_of
from vla_ros_lab.eval import cli


def test_every_control_is_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    for each in CONTROLS:
        name, *words = words_of(each, "checkpoint", range(7, 9))
        assert (name, parser.parse_args(words).seed) == ("eval", 7)
    assert chosen("") == CONTROLS
    with pytest.raises(ValueError, match="plain"):
        chosen("plain,bunp")


def test_figures_of_a_control() -> None:
    ends = ("success", 10), ("wrong_object", 20), ("success", 13), ("success", 13)
    episodes = [
        {"episode_id": seed, "metrics": {"success": reason == "success"}, "reason": reason, "steps": steps}
        for seed, (reason, steps) in enumerate(ends, 7)
    ]
    figures = summarize(chosen("bump")[0], episodes)
    assert figures["success_rate"] == 0.75
    assert figures["wrong_object_rate"] == 0.25
    assert figures["steps"] == 12.0
    assert figures["first_seed"] == 7
    assert not figures["met"]
    assert "| 75.0% | 25.0% | 12.0 | >= 90% MISSED |" in markdown([figures])


def test_the_docs_list_all_controls() -> None:
    page = (Path(__file__).parents[3] / "docs" / "demo-policy.md").read_text(encoding="utf-8").replace('"', "")
    for each in CONTROLS:
        if each.options:
            assert f"| `{' '.join(each.options)}` |" in page, each.name
