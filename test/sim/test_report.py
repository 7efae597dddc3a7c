import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros_lab.sim import report as demo
from vla_ros_lab.sim.results import DemoResult, EpisodeResult


def episode(seed, success):
    return EpisodeResult(
        seed=seed,
        instruction="pick up <b>the</b> red cube",
        success=success,
        steps=16,
        reason="success" if success else "wrong_object",
        images=tuple(np.full((32, 32, 3), 20 * index, np.uint8) for index in range(6)),
        actions=np.random.default_rng(seed).normal(size=(16, 7)),
        tips=np.zeros((16, 1, 3)),
        fingers=np.linspace(0.04, 0, 16)[:, None],
        target="red_cube",
        touched="" if success else "blue_ball",
    )


@pytest.fixture
def result():
    return DemoResult(
        config=load([config_file("demo")], ["policy.checkpoint:=some/folder"]),
        mode="lockstep",
        seed=7,
        episodes=(episode(7, True), episode(8, False)),
        latency_ms={"inference": {"p50": 20.0, "p99": 30.0}, "total": {"p50": 52.0, "p99": 81.0}},
        frames={"received": 32, "used": 31, "dropped": {"stale": 1}},
        latency_samples_ms={"total": np.linspace(40, 90, 32)},
        controls={"dim": 0.5},
        wall_s=3.2,
    )


def test_report_is_one_well_formed_file_that_fetches_nothing(result, tmp_path):
    path = tmp_path / "report.html"
    demo.write(result, path)
    text = path.read_text(encoding="utf-8")
    no_xml = "<!doctype html>|(?<=<style>).*?(?=</style>)|(?<=<details) open"
    page = ElementTree.fromstring(re.sub(f"(?s){no_xml}", "", text))  # fails if an element is not closed
    addresses = [element.get(name) for element in page.iter() for name in ("src", "href", "srcset", "action")]
    assert all(address.startswith("data:image/webp;base64,") for address in addresses if address)
    assert "<script" not in text
    assert not re.search(r"https?://|url\((?!data:)|@import", text)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    assert not list(path.parent.glob("*.part"))


def test_report_contains_the_outcome(result):
    text = demo.render_report(result)
    assert "1 of 2 episodes succeeded." in text
    assert "1 x the wrong object was moved" in text
    assert "moved blue_ball instead of red_cube" in text
    assert "dim = 0.5" in text
    assert text.count("data:image/webp") == 2
    assert "dropped stale" in text
    assert "p99 30 ms" in text, "the inference; other stages are in simulated time"
    assert "p99 81 ms" in demo.render_report(replace(result, mode="real_time"))
    assert "policy:" in text
    assert "<b>the</b>" not in text


def test_two_arms_have_a_chart_for_each_part_of_the_action(result):
    both = [
        replace(one, actions=np.ones((16, 16)), tips=np.zeros((17, 2, 3)), fingers=np.zeros((17, 2)))
        for one in result.episodes
    ]
    words = ["policy.name:=expert", "policy.actions:=joint_position"]
    two = replace(result, config=load([config_file("demo_two_arms")], words), episodes=tuple(both))
    text = demo.render_report(two)
    for title in ("left.joint_position[rad]", "right.gripper", "left: tool position", "right: tool position"):
        assert f">{title}" in text
    assert two.to_json()["arms"] == ["left", "right"]
    assert two.to_json()["action"].count("joint_position") == 2


def test_actions_of_another_length_are_shown(result):
    odd = replace(result, episodes=tuple(replace(one, actions=np.ones((16, 3))) for one in result.episodes))
    assert ">action<" in demo.render_report(odd)


def test_failures_are_shown_first_when_there_are_many(result):
    episodes = [episode(seed, seed != 90) for seed in range(100)]
    chosen = demo.featured(episodes)
    assert len(chosen) == demo.EPISODES_WITH_IMAGES
    assert chosen[0].seed == 90


def test_stages_on_a_simulated_clock_are_left_out(result):
    stats = {
        "latency_ms": {"total": {"p50": 0.0, "p99": 0.0}, "inference": {"p50": 5.0, "p99": 9.0}},
        "latency_samples_ms": {"total": [0.0], "inference": [5.0]},
    }
    found = result.with_stats(stats)
    assert list(found.latency_ms) == list(found.latency_samples_ms) == ["inference"]
