import argparse
import json
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from vla_ros.cli.main import main
from vla_ros.errors import ConfigError
from vla_ros.execution.source import PolicySource
from vla_ros.policies import Session
from vla_ros.types import ActionChunk, Observation
from vla_ros_lab.sim.arguments import episode_options, make_table, mode_of, parse, plan_demo
from vla_ros_lab.sim.environment import PolicyFailedError
from vla_ros_lab.sim.expert import ExpertPolicy
from vla_ros_lab.sim.results import EpisodeResult, steadiness
from vla_ros_lab.sim.simulated_time import SimulatedTime

CHUNKS = ("--actions", "joint_position", "-p", "policy.horizon:=16", "-p", "control.rate_hz:=20.0")


def parsed(*words: str) -> argparse.Namespace:
    return parse("--policy", "expert", *words)


def run(*words: str, seed: int = 3, infer: Callable[..., ActionChunk] | None = None) -> EpisodeResult:
    arguments = parsed("--simulated-time", *words)
    config = plan_demo(arguments).config
    expert = ExpertPolicy(config)
    if infer is not None:
        expert.infer = infer  # type: ignore[method-assign]
    source = PolicySource(expert)
    source.load()
    with closing(make_table(arguments, config)) as table:
        return SimulatedTime(table, config, source, episode_options(arguments, config)).run(seed)


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
    assert result.tips.shape[0] == len(result.fingers) == result.steps + 1


def test_sync_waits_for_each_inference_and_append_does_not() -> None:
    waits, ahead = (run(*CHUNKS, "--delay-ms", "300", "--schedule", kind) for kind in ("sync", "append"))
    assert (waits.reason, ahead.reason) == ("success", "success")
    late, even = (steadiness([each.commands], 20.0) for each in (waits, ahead))
    assert late["stalled_share"] > 0.15
    assert late["longest_gap_ms"] == pytest.approx(300, abs=51)
    assert even["stalled_share"] == 0
    assert even["longest_gap_ms"] == pytest.approx(50, abs=1e-3)
    assert ahead.steps < 0.9 * waits.steps


def test_the_machine_does_not_change_the_result() -> None:
    """A policy that is randomly slow by the real clock gives bit-identical commands."""
    words = (*CHUNKS, "--delay-ms", "200", "--schedule", "blend")
    fast = run(*words)
    config = plan_demo(parsed("--simulated-time", *words)).config
    expert, pauses = ExpertPolicy(config), iter([0.3, 0.0, 0.5])

    def slow(session: Session, observation: Observation) -> ActionChunk:
        time.sleep(next(pauses, 0.0))
        return expert.infer(session, observation)

    again = run(*words, infer=slow)
    assert again.steps == fast.steps
    np.testing.assert_array_equal(again.commands.positions, fast.commands.positions)
    np.testing.assert_array_equal(again.commands.times, fast.commands.times)


def test_a_switched_instruction_is_followed_and_a_shuffled_one_fails() -> None:
    switched = run("--switch-at", "6")
    assert (switched.reason, switched.instruction) != ("success", run().instruction)
    assert switched.success
    assert run("--shuffle").reason == "wrong_object"


def test_a_policy_that_fails_ends_the_run_with_the_reason() -> None:
    def broken(session: Session, observation: Observation) -> ActionChunk:
        raise RuntimeError("the model broke")

    with pytest.raises(PolicyFailedError, match=r"inference_error \(RuntimeError: the model broke\)"):
        run(infer=broken)


def test_the_command_writes_its_figures(tmp_path, capsys) -> None:
    words = ["demo", "--policy", "expert", *CHUNKS, "--delay-ms", "100", "--episodes", "2"]
    assert main([*words, "--json", str(tmp_path / "f.json"), "--report", str(tmp_path / "r.html")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert (figures["mode"], figures["delay_ms"], figures["success_rate"]) == ("simulated_time", 100.0, 1.0)
    assert figures["stalled_share"] == 0
    assert figures["frames"]["used"] > 4
    assert "2 of 2 episodes succeeded (simulated time" in capsys.readouterr().out
