import argparse
import json
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from vla_ros.cli.main import main
from vla_ros.config import Config
from vla_ros.errors import ConfigError
from vla_ros.execution.source import PolicySource
from vla_ros.policies import Session
from vla_ros.types import ActionChunk, Observation
from vla_ros_lab.eval.arguments import mode_of, parse, plan_demo
from vla_ros_lab.eval.port import SIMULATED, NodePort, PolicyFailedError
from vla_ros_lab.eval.results import Score, steadiness
from vla_ros_lab.eval.runner import EpisodeRunner
from vla_ros_lab.eval.scene import episode_options, make_table
from vla_ros_lab.sim.expert import ExpertPolicy

CHUNKS = ("--actions", "joint_position", "-p", "policy.horizon:=16", "-p", "control.rate_hz:=20.0")


def parsed(*words: str) -> argparse.Namespace:
    return parse("--policy", "expert", *words)


class Answering(ExpertPolicy):
    """The expert, whose chunks ``change`` may replace."""

    def __init__(self, config: Config, change: Callable[[ActionChunk], ActionChunk]) -> None:
        super().__init__(config)
        self._change = change

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return self._change(super().infer(session, observation))


def run(*words: str, seed: int = 3, change: Callable[[ActionChunk], ActionChunk] = lambda chunk: chunk) -> Score:
    arguments = parsed("--simulated-time", *words)
    config = plan_demo(arguments).config
    source = PolicySource(Answering(config, change))
    source.load()
    with closing(make_table(arguments, config)) as table:
        port = NodePort(config, source, SIMULATED)
        return EpisodeRunner(table, port, episode_options(arguments, config)).run(seed)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ((), "lockstep"),
        (("--delay-ms", "100"), "simulated_time"),
        (("--simulated-time",), "simulated_time"),
        (("--real-time", "--delay-ms", "100"), "real_time"),
    ],
)
def test_a_delay_uses_the_clock_of_the_mode(words: tuple[str, ...], mode: str) -> None:
    arguments = parsed(*words)
    config = plan_demo(arguments).config
    assert mode_of(arguments) == mode
    assert (config.node.clock == "inputs") == (mode == "lockstep")
    assert config.control.inject_delay_ms == arguments.delay_ms


@pytest.mark.parametrize("option", [("--record", "bag"), ("--attach",)])
def test_options_that_need_a_graph_are_refused(option: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="need a ROS graph"):
        plan_demo(parsed("--simulated-time", *option))


def test_an_unknown_camera_is_named() -> None:
    assert run("-p", "camera.topics:=[/wrist_camera/image_raw]").success
    with pytest.raises(
        ConfigError, match=r"camera.topics: found /side; the simulation has /camera/image_raw, /wrist"
    ):
        run("-p", "camera.topics:=[/side]")


@pytest.mark.parametrize("words", [(), ("--actions", "joint_velocity"), ("--arms", "2", "--actions", "eef_pose")])
def test_arms_obey_every_output(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.reason == "success"
    assert result.trace.tips.shape[0] == len(result.trace.fingers) == result.steps + 1


def test_sync_waits_for_each_inference_and_append_does_not() -> None:
    waits, ahead = (run(*CHUNKS, "--delay-ms", "300", "--schedule", kind) for kind in ("sync", "append"))
    assert (waits.reason, ahead.reason) == ("success", "success")
    late, even = (steadiness([each.trace.commands], 20.0) for each in (waits, ahead))
    assert late["stalled_share"] > 0.15
    assert late["longest_gap_ms"] == pytest.approx(300, abs=51)
    assert even["stalled_share"] == 0
    assert even["longest_gap_ms"] == pytest.approx(50, abs=1e-3)
    assert ahead.steps < 0.9 * waits.steps


def test_the_machine_does_not_change_the_result() -> None:
    """A policy that is randomly slow by the real clock gives bit-identical commands."""
    words = (*CHUNKS, "--delay-ms", "200", "--schedule", "blend")
    fast = run(*words)
    pauses = iter([0.3, 0.0, 0.5])

    def slow(chunk: ActionChunk) -> ActionChunk:
        time.sleep(next(pauses, 0.0))
        return chunk

    again = run(*words, change=slow)
    assert again.steps == fast.steps
    np.testing.assert_array_equal(again.trace.commands.positions, fast.trace.commands.positions)
    np.testing.assert_array_equal(again.trace.commands.times, fast.trace.commands.times)


def test_a_person_who_may_take_over_delays_no_command() -> None:
    """The leader's joints are heard 50 times a second, and each of the policy's steps goes out with its frame."""
    leader = ("takeover.input:=leader", "takeover.leader:=/leader", "takeover.gripper:=hand = 0..1")
    commands = run(*(word for option in leader for word in ("-p", option))).trace.commands
    stamps = (commands.stamps - commands.stamps[0]) / 1e9
    np.testing.assert_allclose(stamps, 0.1 * np.arange(len(stamps)), atol=1e-6)
    np.testing.assert_allclose(commands.times[:-1] - commands.times[0], stamps, atol=1e-6)


def test_a_switched_instruction_is_followed_and_a_shuffled_one_fails() -> None:
    switched = run("--switch-at", "6")
    assert (switched.reason, switched.instruction) != ("success", run().instruction)
    assert switched.success
    assert run("--shuffle").reason == "wrong_object"


def test_a_policy_that_fails_ends_the_run_with_the_reason() -> None:
    def broken(chunk: ActionChunk) -> ActionChunk:
        raise RuntimeError("the model broke")

    with pytest.raises(PolicyFailedError, match=r"inference_error \(RuntimeError: the model broke\)"):
        run(change=broken)


def test_the_command_writes_its_figures(tmp_path, capsys) -> None:
    words = ["demo", "--policy", "expert", *CHUNKS, "--delay-ms", "100", "--episodes", "2"]
    assert main([*words, "--json", str(tmp_path / "f.json"), "--report", str(tmp_path / "r.html")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert (figures["mode"], figures["delay_ms"], figures["success_rate"]) == ("simulated_time", 100.0, 1.0)
    assert figures["stalled_share"] == 0
    assert figures["frames"]["used"] > 4
    assert "2 of 2 episodes succeeded (simulated time" in capsys.readouterr().out
