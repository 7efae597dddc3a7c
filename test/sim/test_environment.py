import itertools
from collections.abc import Collection
from pathlib import Path

import mujoco
import numpy as np
import pytest

from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.control.command import Command
from vla_ros.errors import ConfigError
from vla_ros.execution.source import PolicySource
from vla_ros.policies.base import Policy, Session
from vla_ros.types import ActionChunk, JointState, Observation
from vla_ros_lab.eval.port import SIMULATED, NodePort
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.environment import Environment, Measurements

NAMES = (*arm.JOINT_NAMES, *arm.FINGER_NAMES)


class Reach(Environment):
    """Reach joint positions: MuJoCo drives hinges, without a world around them; success within 0.05 rad."""

    step_seconds = 0.05
    instruction = "reach the goal"

    def __init__(self) -> None:
        hinges, drives = "", ""
        for name in arm.JOINT_NAMES:
            hinges += f"<body><joint name='{name}' damping='2'/><geom size='0.05' mass='1'/></body>"
            drives += f"<position joint='{name}' kp='40'/>"
        fixed = "<option gravity='0 0 0'/>"
        self.model = mujoco.MjModel.from_xml_string(
            f"<mujoco>{fixed}<worldbody>{hinges}</worldbody><actuator>{drives}</actuator></mujoco>"
        )

    def reset(self, seed: int) -> None:
        self.data, self.done, self.success = mujoco.MjData(self.model), False, False
        self.data.qpos[:] = self.data.ctrl[:] = arm.HOME
        self.goal = arm.HOME + np.random.default_rng(seed).uniform(-0.25, 0.25, 7)
        self.commands: list[Command] = []

    def observe(self, cameras: Collection[str], stamp: int) -> Measurements:
        joints = JointState(NAMES, np.append(self.data.qpos, [0.04, 0.04]), stamp)
        goal = JointState(arm.JOINT_NAMES, self.goal, stamp)
        return Measurements([joints], dict.fromkeys(cameras, np.zeros((64, 64, 3), np.uint8)), {"/goal": goal})

    def apply(self, command: Command) -> None:
        self.commands.append(command)
        self.data.ctrl[:] = command.positions[:7]

    def step(self) -> None:
        for _ in range(25):  # of 2 ms
            mujoco.mj_step(self.model, self.data)
        self.done = self.success = bool(np.abs(self.data.qpos - self.goal).max() < 0.05)


class GoTo(Policy):
    """Sends the goal, or with ``still`` the measured positions."""

    def __init__(self, config: Config, *, still: bool = False) -> None:
        self._still = still
        joints, goal = (parse_components(text) for text in ("arm.joint_position", "topic.goal[7]"))
        self.spec = PolicySpec(
            tuple(map(ImageFeature, config.camera.keys)),
            (StateFeature("joints", joints), StateFeature("goal", goal)),
            parse_components("arm.joint_position + arm.gripper", action=True),
            dimension=8,
            horizon=1,
            rate_hz=20.0,
        )

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return ActionChunk(
            np.append(observation.state["joints" if self._still else "goal"], 1.0)[None], observation.stamp
        )


def run(*assignments: str, seeds: int = 1, still: bool = False, max_steps: int = 60):
    config = load(
        [config_file("demo")],
        ["robot.state_topics:=[goal=/goal]", "control.rate_hz:=20.0", "policy.name:=hold", *assignments],
    )
    source, reach = PolicySource(GoTo(config, still=still)), Reach()
    source.load()
    port = NodePort(config, source, SIMULATED)
    runner = EpisodeRunner(reach, port, EpisodeOptions(max_steps, camera_hz=20.0))
    return [runner.run(seed) for seed in range(seeds)], reach, port


def test_another_simulator_is_driven_to_its_goal():
    results, _, port = run(seeds=3)
    assert [(one.success, one.reason, one.instruction) for one in results] == [
        (True, "success", "reach the goal")
    ] * 3
    assert all(2 < one.steps < 60 for one in results)
    assert port.stats["frames"]["dropped"] == {}
    assert results[0].trace.commands.positions.shape[1] == 7
    again, _, _ = run(seeds=3)
    for one, other in zip(results, again, strict=True):
        np.testing.assert_array_equal(one.trace.commands.positions, other.trace.commands.positions)


def test_its_commands_pass_the_nodes_limits():
    (result,), reach, _ = run("limits.max_joint_step:=0.05")
    assert result.success
    steps = [b.positions[:7] - a.positions[:7] for a, b in itertools.pairwise(reach.commands)]
    assert np.abs(steps).max() <= 0.06
    (free,), _, _ = run()
    assert result.steps > free.steps


def test_a_policy_that_does_not_reach_it_fails():
    (result,), _, _ = run(still=True, max_steps=10)
    assert (result.success, result.reason, result.steps) == (False, "timeout", 10)


@pytest.mark.parametrize(("delay_ms", "gap"), [(0.0, 0.05), (300.0, 0.3)])
def test_an_inference_takes_simulated_time(delay_ms, gap):
    (result,), _, _ = run(f"control.inject_delay_ms:={delay_ms}")
    # The last time is the end of the episode. The next frame may come up to a period later.
    assert gap - 1e-3 <= np.median(np.diff(result.trace.commands.times[:-1])) <= gap + 0.05


def test_a_camera_that_the_simulator_lacks_is_named():
    with pytest.raises(ConfigError, match=r"found /side; the simulation has /camera/image_raw"):
        run("camera.topics:=[/side]")


def test_the_table_is_one_file():
    """Nothing else of the package knows it, except the demo and the default topics of its port on the graph."""
    sources = Path(arm.__file__).parents[1].rglob("*.py")
    users = {path.stem for path in sources if "vla_ros_lab.sim.table import" in path.read_text()}
    assert users == {"scene", "graph"}
