"""Episodes in one process, without a ROS graph, for demonstrations, evaluation and fast tests.

Actions go through the node's :class:`vla_ros.control.robot.RobotController`.
"""

from collections.abc import Callable

import numpy as np

from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.command import Command
from vla_ros.control.robot import RobotController, make_kinematics
from vla_ros.kinematics.rotations import rotation_vector_matrix
from vla_ros.sim import arm
from vla_ros.sim.environment import Episode, EpisodeOptions
from vla_ros.sim.results import EpisodeResult
from vla_ros.sim.table import TableEnvironment, TableOptions
from vla_ros.sim.world import TableTop
from vla_ros.types import ActionChunk, FloatArray, JointState, Observation

Infer = Callable[[Observation], ActionChunk]
"""Called once per chunk, such as a policy's ``infer``."""

_LOW, _HIGH, _MOST = (0.25, -0.42, 0.008), (0.80, 0.42, 0.50), 0.3  # m and rad, as in config/demo.yaml

Noise = Callable[[int, FloatArray], FloatArray]
"""Maps a step and the undisturbed action [D] to the action to execute."""


def make_controller(spec: PolicySpec, config: Config | None = None) -> RobotController:
    """Return the node's controller for a policy with this ``spec``; options default to ``config/demo.yaml``."""
    config = config or load([config_file("demo")])
    return RobotController(config, spec, make_kinematics(config))


def state_of(world: TableTop) -> dict[str, FloatArray]:
    """Return the expert's state vectors, as the policy node builds them from its topics."""
    joints = world.joint_positions().reshape(len(world.mounts), -1)
    split = len(arm.JOINT_NAMES)
    return {
        "joints": joints[:, :split].ravel(),
        "fingers": joints[:, split:].ravel(),
        "objects": world.object_state(0).positions,
    }


class DirectControl:
    """Executes end-effector deltas [7] with the expert's kinematics, without Pinocchio."""

    def reset(self) -> None:
        """Do nothing; there is no state."""

    def check(self, chunk: ActionChunk) -> None:
        """Accept every chunk."""

    def executed(self) -> None:
        """Do nothing; steps are not counted."""

    def command(self, action: FloatArray, joints: JointState, stamp: int, dt: float) -> tuple[Command]:
        """Return the command that moves to the delta's goal, clipped to the workspace."""
        now = joints.positions[:7]
        pose = arm.forward(now)
        place = np.clip(pose[:3, 3] + action[:3], _LOW, _HIGH)
        goal = arm.solve(place, rotation_vector_matrix(action[3:6]) @ pose[:3, :3], now, 3)
        fingers = np.full(2, arm.FINGER_TRAVEL if action[6] > 0.5 else 0.0)
        return (Command(joints.names, np.concatenate([now + np.clip(goal - now, -_MOST, _MOST), fingers]), stamp),)


def run_episode(
    world: TableTop,
    infer: Infer,
    controller: RobotController | DirectControl,
    seed: int,
    *,
    options: EpisodeOptions | None = None,
    controls: TableOptions | None = None,
    render_every: int = 1,
    noise: Noise | None = None,
) -> EpisodeResult:
    """Run one episode step by step, until it is over.

    Args:
        world: The table-top.
        infer: The policy; all steps of its chunks are executed.
        controller: From :func:`make_controller`; it is reset first.
        seed: Seed of the scene.
        options: When the episode ends.
        controls: Which instruction it has.
        render_every: Steps between images; 0: no images. At other steps, ``Observation.images`` is empty.
        noise: Changes the actions before they are executed.

    Raises:
        vla_ros.control.reasons.Refused: The controller refused a command.
    """
    table = TableEnvironment(world, controls)
    episode = Episode(table, seed, options or EpisodeOptions())
    controller.reset()
    seconds = 1 / world.options.rate_hz
    while not episode.over:
        stamp = round((episode.steps + 1) * seconds * 1e9)
        image = world.render() if render_every and episode.steps % render_every == 0 else None
        images = {} if image is None else {"image": image}
        chunk = infer(Observation(images, table.instruction, stamp, state_of(world)))
        controller.check(chunk)
        for action in chunk.actions:
            if image is not None:
                table.keep(image)
            episode.actions.append(action)
            executed = action if noise is None else noise(episode.steps, np.array(action))
            for command in controller.command(executed, world.joint_state(stamp), stamp, seconds):
                table.apply(command)
            controller.executed()
            image = None
            if episode.step():
                break
    return episode.result()
