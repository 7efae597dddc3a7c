import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np

from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros_lab.eval import report
from vla_ros_lab.eval.demo import make_figures, render_report
from vla_ros_lab.eval.results import Score, Trace


def episode(seed, success):
    trace = Trace(
        images=tuple(np.full((32, 32, 3), 20 * index, np.uint8) for index in range(6)),
        actions=np.random.default_rng(seed).normal(size=(16, 7)),
        tips=np.zeros((16, 1, 3)),
        fingers=np.linspace(0.04, 0, 16)[:, None],
        target="red_cube",
    )
    return Score(
        "table",
        seed,
        success,
        instruction="pick up <b>the</b> red cube",
        steps=16,
        seconds=1.6,
        reason="success" if success else "wrong_object",
        touched="" if success else "blue_ball",
        trace=trace,
    )


CONFIG = load([config_file("demo")], ["policy.checkpoint:=some/folder"])
EPISODES = (episode(7, True), episode(8, False))
STATS = {
    "latency_ms": {"inference": {"p50": 20.0, "p99": 30.0}, "total": {"p50": 52.0, "p99": 81.0}},
    "frames": {"received": 32, "used": 31, "dropped": {"stale": 1}},
    "latency_samples_ms": {"total": np.linspace(40, 90, 32)},
}


def rendered(scores=EPISODES, config: Config = CONFIG, stats=STATS) -> str:
    figures = {**make_figures(config, "lockstep", scores, stats), "controls": {"dim": 0.5}, "wall_s": 3.2}
    return render_report(figures, scores, config, stats["latency_samples_ms"])


def test_report_is_one_well_formed_file_that_fetches_nothing():
    text = rendered()
    no_xml = "<!doctype html>|(?<=<style>).*?(?=</style>)|(?<=<details) open"
    page = ElementTree.fromstring(re.sub(f"(?s){no_xml}", "", text))  # fails if an element is not closed
    addresses = [element.get(name) for element in page.iter() for name in ("src", "href", "srcset", "action")]
    assert all(address.startswith("data:image/webp;base64,") for address in addresses if address)
    assert "<script" not in text
    assert not re.search(r"https?://|url\((?!data:)|@import", text)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text


def test_report_contains_the_outcome():
    text = rendered()
    assert "1 of 2 episodes succeeded." in text
    assert "95 % interval 9.5 to 90.5 %" in text
    assert "1 x the wrong object was moved" in text
    assert "moved blue_ball instead of red_cube" in text
    assert "dim = 0.5" in text
    assert text.count("data:image/webp") == 2
    assert "dropped stale" in text
    for stage, p50, p99 in (("inference", 20, 30), ("total", 52, 81)):
        assert f'>{stage}</td><td class="n">{p50}</td><td class="n">{p99}</td>' in text
    assert "policy:" in text
    assert "<b>the</b>" not in text


def test_two_arms_have_a_chart_for_each_part_of_the_action():
    trace = Trace(actions=np.ones((16, 16)), tips=np.zeros((17, 2, 3)), fingers=np.zeros((17, 2)))
    both = [replace(one, trace=trace) for one in EPISODES]
    config = load([config_file("demo_two_arms")], ["policy.name:=expert", "policy.actions:=joint_position"])
    text = rendered(both, config)
    for title in ("left.joint_position[rad]", "right.gripper", "left: tool position", "right: tool position"):
        assert f">{title}" in text
    figures = make_figures(config, "lockstep", both, STATS)
    assert figures["arms"] == ["left", "right"]
    assert figures["action"].count("joint_position") == 2


def test_actions_of_another_length_are_shown():
    odd = [replace(one, trace=replace(one.trace, actions=np.ones((16, 3)))) for one in EPISODES]
    assert ">action<" in rendered(odd)


def test_failures_are_shown_first_when_there_are_many():
    episodes = [episode(seed, seed != 90) for seed in range(100)]
    chosen = report.featured(episodes)
    assert len(chosen) == report.FEATURED
    assert chosen[0].state == 90


def test_stages_on_a_simulated_clock_are_left_out():
    stats = {
        "latency_ms": {"total": {"p50": 0.0, "p99": 0.0}, "inference": {"p50": 5.0, "p99": 9.0}},
        "latency_samples_ms": {"total": [0.0], "inference": [5.0]},
    }
    assert list(make_figures(CONFIG, "lockstep", EPISODES, stats)["latency_ms"]) == ["inference"]
    assert ">total<" not in rendered(stats=stats)
