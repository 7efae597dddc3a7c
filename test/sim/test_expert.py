from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros.execution.source import PolicySource
from vla_ros.kinematics.rotations import read_rotation
from vla_ros.policies import Policy, Session, available
from vla_ros.types import ActionChunk, Observation
from vla_ros_lab.eval.port import NodePort
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.sim import arm
from vla_ros_lab.sim.expert import ACTIONS, MAX_STEP, MAX_TURN, ExpertPolicy, decide
from vla_ros_lab.sim.table import TableEnvironment
from vla_ros_lab.sim.tasks import TASK_NAMES, make_task
from vla_ros_lab.sim.world import TableTop, WorldOptions


def ask(policy, observation):
    return policy.infer(policy.start_session(), observation)


@pytest.fixture
def expert() -> ExpertPolicy:
    policy = ExpertPolicy(load([config_file("demo")]))
    policy.load()
    return policy


def observation(world: TableTop, instruction: str) -> Observation:
    joints = world.joint_positions().reshape(len(world.mounts), -1)
    split = len(arm.JOINT_NAMES)
    objects = world.object_state(0).positions
    state = {"joints": joints[:, :split].ravel(), "fingers": joints[:, split:].ravel(), "objects": objects}
    return Observation({}, instruction, 5, state)


def in_lockstep(world: TableTop, expert: type[ExpertPolicy] = ExpertPolicy) -> EpisodeRunner:
    """Episodes of an expert, driven by the node."""
    config = load([config_file("demo")], ["policy.name:=expert", "control.schedule:=sync"])
    port = NodePort(config, PolicySource(expert(config)).start())
    return EpisodeRunner(TableEnvironment(world), port, EpisodeOptions())


def test_the_expert_is_found_by_its_entry_point(expert):
    assert isinstance(expert, Policy)
    assert "expert" in available()
    assert expert.spec.state_topics == ("objects",)
    assert expert.spec.motion == "tip_delta"


def test_the_expert_solves_picks_and_pushes():
    with TableTop(WorldOptions(width=16, height=16, tasks=("pick", "pick", *TASK_NAMES[1:]))) as world:
        runner = in_lockstep(world)
        results = [runner.run(seed) for seed in range(16)]
    assert {result.instruction.split()[-1] for result in results} >= {"left", "right"}
    failed = [(result.state, result.instruction, result.reason) for result in results if not result.success]
    assert not failed
    assert np.mean([result.steps for result in results]) < 25
    assert not any(result.limited + result.refused for result in results), "the expert stays within all limits"


class Noisy(ExpertPolicy):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._random = np.random.default_rng(0)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        chunk = super().infer(session, observation)
        action = chunk.actions[0].copy()
        action[:3] += self._random.normal(scale=0.006, size=3)
        if self._random.random() < 0.05:
            action[6] = 1 - action[6]
        return replace(chunk, actions=action[np.newaxis])


def test_the_expert_recovers_from_bumps_and_noisy_actions():
    with TableTop(WorldOptions(width=16, height=16, bump=0.05)) as world:
        runner = in_lockstep(world, Noisy)
        results = [runner.run(seed) for seed in range(8)]
    assert sum(result.success for result in results) >= 7


@pytest.mark.parametrize("arms", [1, 2])
@pytest.mark.parametrize("actions", list(ACTIONS))
def test_all_kinds_of_actions_describe_the_same_step(actions, arms):
    """All kinds lead each arm's tool to the same pose."""
    with TableTop(WorldOptions(arms=arms)) as world:
        expert = ExpertPolicy(simulated(world, actions))
        action = ask(expert, observation(world, world.scene.instruction)).actions[0]
        task, objects = world.scene.task, world.object_positions()
        expected = {}
        for index, mount in enumerate(world.mounts):
            joints = world.joint_positions().reshape(arms, -1)[index]
            pose, target = arm.forward(joints[:7]), task.targets[index]
            one = {target: objects[target] - mount.position}
            motion = decide(replace(task, targets=(target,)), pose, float(joints[7:].mean()), one)
            expected[mount.name] = pose[:3, 3] + motion[:3], joints[:7], motion
        for part, columns in expert.spec.columns():
            numbers = action[columns]
            position, joints, motion = expected[part.arm]
            if part.quantity == "gripper":
                np.testing.assert_array_equal(numbers, motion[6:])
            elif part.quantity == "tip_delta":
                np.testing.assert_array_equal(numbers, motion[:6])
            elif part.quantity == "tip_position":
                np.testing.assert_allclose(numbers, position)
            elif part.quantity == "tip_rotation":
                np.testing.assert_allclose(read_rotation(numbers, part.form), arm.TOOL_DOWN, atol=0.01)
            else:
                reached = numbers if part.quantity == "joint_position" else joints + 0.1 * numbers
                np.testing.assert_allclose(arm.forward(reached)[:3, 3], position, atol=1e-4)
                np.testing.assert_allclose(arm.forward(reached)[:3, :3], arm.TOOL_DOWN, atol=0.01)


@pytest.mark.parametrize("tasks", [("pick",), ("push_left", "push_right")])
def test_chunks_executed_open_loop_succeed(tasks):
    """The expert infers after every eight steps of its chunks of sixteen."""
    chosen = [
        "policy.name:=expert",
        "policy.actions:=joint_position",
        "policy.horizon:=16",
        "control.rate_hz:=20.0",
    ]
    expert = ExpertPolicy(load([config_file("demo")], chosen))
    assert (expert.spec.horizon, expert.spec.dimension, expert.spec.rate_hz) == (16, 8, 20.0)
    with TableTop(WorldOptions(tasks=tasks, rate_hz=20.0)) as world:
        for seed in range(4):
            world.reset(seed)
            steps = 0
            while not world.judge.decided and steps < 100:
                for action in ask(expert, observation(world, world.scene.instruction)).actions[:8]:
                    world.step(np.append(action[:7], np.full(2, action[7] * arm.FINGER_TRAVEL)))
                    steps += 1
            assert world.judge.success, f"seed {seed}: {world.judge.reason or 'timeout'}"


@pytest.mark.parametrize("rate_hz", [10.0, 20.0, 50.0])
def test_steps_are_as_long_as_the_rate_allows(world, rate_hz):
    """At any rate the tool moves at most 0.3 m/s."""
    pose, target = arm.forward(arm.HOME), world.scene.task.target
    motion = decide(world.scene.task, pose, 0.04, {target: np.array([0.6, 0.3, 0.02])}, rate_hz)
    assert np.linalg.norm(motion[:3]) * rate_hz == pytest.approx(10 * MAX_STEP)


def simulated(world: TableTop, actions: str) -> Config:
    """Options for the arms of a world."""
    config = load([config_file("demo")], ["policy.name:=expert", f"policy.actions:={actions}"])
    arms = tuple(replace(config.arms[0], name=mount.name) for mount in world.mounts)
    return cast(
        Config, SimpleNamespace(arms=arms, policy=config.policy, camera=config.camera, control=config.control)
    )


def test_the_same_state_gives_the_same_action(world, expert):
    first = ask(expert, observation(world, world.scene.instruction)).actions
    for thing in world.scene.objects:
        ask(expert, observation(world, f"push the {thing.colour} {thing.shape} to the left"))
    np.testing.assert_array_equal(ask(expert, observation(world, world.scene.instruction)).actions, first)


def test_the_instruction_decides_the_object(world, expert):
    """In the same state the arm moves towards the named object."""
    directions = []
    for thing in world.scene.objects:
        action = ask(expert, observation(world, make_task("pick", thing.name).instruction)).actions[0]
        way = np.subtract(thing.position, world.tool_position())[:2]
        if np.linalg.norm(way) > 0.03:
            assert np.dot(action[:2], way) / np.linalg.norm(action[:2]) / np.linalg.norm(way) > 0.99
        directions.append(action[:2])
    assert len({tuple(np.round(way, 6)) for way in directions}) == len(directions)


def test_actions_are_bounded_in_any_state(world):
    random = np.random.default_rng(3)
    limits = np.array([joint.limits for joint in arm.CHAIN])
    objects = world.object_positions()
    for task in TASK_NAMES:
        for _ in range(100):
            joints = random.uniform(limits[:, 0], limits[:, 1])
            action = decide(
                make_task(task, world.scene.task.target), arm.forward(joints), random.uniform(0, 0.04), objects
            )
            assert action.shape == (7,)
            assert np.linalg.norm(action[:3]) <= MAX_STEP + 1e-9
            assert np.abs(action[3:6]).max() <= MAX_TURN
            assert action[6] in (0.0, 1.0)


@pytest.mark.parametrize("instruction", ["make coffee", "pick up the {absent}"])
def test_an_unknown_instruction_holds_the_arm(world, expert, instruction):
    names = {f"{colour} {shape}" for colour in ("red", "green") for shape in ("cube", "cylinder", "ball")}
    absent = min(names - {thing.name.replace("_", " ") for thing in world.scene.objects})
    action = ask(expert, observation(world, instruction.format(absent=absent))).actions[0]
    np.testing.assert_array_equal(action, [0, 0, 0, 0, 0, 0, 1])
