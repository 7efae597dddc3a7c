"""Episodes in one process, without DDS: for making data and for fast tests.

The command path is the node's own: :class:`vla_ros.control.controller.Controller` with the options of
``config/demo.yaml``. What is left out is the graph and the second process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros.control.controller import Controller
from vla_ros.control.kinematics import Kinematics
from vla_ros.sim.results import EpisodeResult
from vla_ros.sim.scene import Scene
from vla_ros.sim.trace import Trace
from vla_ros.sim.world import STEP_SECONDS, TableTop
from vla_ros.types import ActionChunk, ActionSpec, FloatArray, Observation

MAX_STEPS = 80
"""Control steps after which an episode has failed."""

STEP_NANOSECONDS = round(STEP_SECONDS * 1e9)

Answer = Callable[[Observation], ActionChunk]
"""What is asked at each step: the ``infer`` of a policy."""

Noise = Callable[[int, FloatArray], FloatArray]
"""From the step and the clean action [D] to the one that is executed."""


def make_controller(spec: ActionSpec, config: Config | None = None) -> Controller:
    """The node's controller for a policy with this ``spec``.

    Args:
        spec: What the policy's numbers mean.
        config: Options; None takes ``config/demo.yaml``.
    """
    config = config or load([config_file("demo")])
    robot = config.robot
    kinematics = Kinematics.from_urdf(robot.urdf, robot.joint_names, robot.base_frame, robot.tip_frame)
    return Controller(config, spec, kinematics)


def run_episode(
    world: TableTop,
    answer: Answer,
    controller: Controller,
    seed: int,
    *,
    scene: Scene | None = None,
    max_steps: int = MAX_STEPS,
    render: bool = True,
    noise: Noise | None = None,
    on_step: Callable[[Observation, ActionChunk], None] | None = None,
) -> EpisodeResult:
    """One episode: ask, command, 0.1 s of physics, until it is decided.

    Args:
        world: The table-top.
        answer: Asked once per chunk; all steps of the chunk are executed.
        controller: From :func:`make_controller`; reset here.
        seed: Seed of the scene.
        scene: Take this scene instead.
        max_steps: Steps after which the episode has failed.
        render: False leaves ``Observation.images`` empty, for policies that look at poses only.
        noise: Spoils the action that is executed; ``on_step`` still sees the clean one.
        on_step: Told every observation with the answer to it.

    Raises:
        vla_ros.control.reasons.Refused: The controller would not send a command.
    """
    scene = world.reset(seed, scene)
    controller.reset()
    trace = Trace()
    step = 0
    decided = False
    while step < max_steps and not decided:
        stamp = (step + 1) * STEP_NANOSECONDS
        joints = world.joint_state(stamp)
        image = world.render() if render else None
        observation = Observation(
            images={} if image is None else {"image": image},
            instruction=scene.instruction,
            stamp=stamp,
            joints=joints,
            state={"objects": world.object_state(stamp)},
        )
        chunk = answer(observation)
        controller.check(chunk)
        if on_step is not None:
            on_step(observation, chunk)
        for action in chunk.actions:
            trace.add(world, image)
            trace.actions.append(action)
            executed = action if noise is None else noise(step, np.array(action))
            command = controller.command(executed, world.joint_state(stamp), stamp, STEP_SECONDS)
            world.command_named(command.names, command.positions.tolist())
            controller.executed()
            decided = world.step()
            step += 1
            image = None
            if decided or step >= max_steps:
                break
    trace.add(world, world.render() if render else None)
    return trace.result(world, seed, scene, step, "timeout")
