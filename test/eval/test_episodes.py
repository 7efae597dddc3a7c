import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from vla_ros.config import Config, load
from vla_ros.config.files import config_file
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.execution.source import PolicySource
from vla_ros.graph import open_graph
from vla_ros.graph.node import Graph
from vla_ros.node.policy_node import PolicyNode
from vla_ros.policies import Session
from vla_ros.types import ActionChunk, Observation
from vla_ros_lab.eval import graph as module
from vla_ros_lab.eval.arguments import LOCKSTEP_OPTIONS, parse, plan_demo
from vla_ros_lab.eval.command import free_domain
from vla_ros_lab.eval.graph import GraphPort
from vla_ros_lab.eval.port import LOCKSTEP, WALL, NodePort, PolicyFailedError
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.eval.scene import make_table
from vla_ros_lab.sim.expert import ACTIONS, ExpertPolicy
from vla_ros_lab.sim.table import TableEnvironment, TableOptions
from vla_ros_lab.sim.world import TableTop

DEMO = load([config_file("demo")])


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    monkeypatch.setenv("ROS_DOMAIN_ID", str(free_domain()))
    monkeypatch.delenv("ROS_LOCALHOST_ONLY", raising=False)
    with open_graph("dds", (), "error") as joined:
        yield joined


Answer = Callable[[Observation, ActionChunk], ActionChunk]


class Watched(ExpertPolicy):
    """The expert, which records the brightness of images and the instructions; ``answer`` changes its chunks."""

    def __init__(self, config: Config, answer: Answer) -> None:
        super().__init__(config)
        self.answer, self.node = answer, None
        self.brightness: list[float] = []
        self.instructions: list[str] = []

    def infer(self, session: Session, observation: Observation):
        self.brightness.append(float(observation.images["image"].mean()))
        self.instructions.append(observation.instruction)
        return self.answer(observation, super().infer(session, observation))


@pytest.fixture
def policy(graph: Graph) -> Iterator[Callable[..., Watched]]:
    """Start policy nodes on a participant and a thread of their own."""
    nodes: list[PolicyNode] = []
    own, ended = open_graph("dds", (), "error"), threading.Event()
    thread = threading.Thread(target=own.spin, args=(ended.is_set, 0.05))

    def start(
        *assignments: str, config: Config | None = None, answer: Answer = lambda observation, chunk: chunk
    ) -> Watched:
        config = config or load([config_file("demo")], [*LOCKSTEP_OPTIONS, *assignments])
        answering = Watched(config, answer)
        node = answering.node = PolicyNode(own, own.create_node("vla_policy"), config)
        nodes.append(node)
        node.configure(source=PolicySource(answering))
        node.activate()
        thread.start()
        return answering

    yield start
    ended.set()
    if nodes:
        thread.join()
    for node in nodes:
        node.cleanup()
    own.close()


def of_demo(*words: str) -> tuple[Config, TableTop]:
    """Options and world of `vla-ros demo`."""
    arguments = parse("--policy", "expert", *words)
    config = plan_demo(arguments).config
    return config, make_table(arguments, config).world


def runner(graph: Graph, world: TableTop, config: Config = DEMO, clock=LOCKSTEP, **options) -> EpisodeRunner:
    port = GraphPort(graph, config.arms, clock, timeout=options.get("step_timeout", 30.0))
    port.wait_for_policy(10.0)
    controls = {name: options.pop(name) for name in ("blank", "switch_at") if name in options}
    return EpisodeRunner(TableEnvironment(world, TableOptions(**controls)), port, EpisodeOptions(**options))


@pytest.mark.parametrize("arms", [1, 2])
@pytest.mark.parametrize("actions", list(ACTIONS))
def test_arms_obey_every_kind_of_action_as_in_a_single_process(graph, policy, arms, actions):
    config, world = of_demo("--arms", str(arms), "--actions", actions)
    with world:
        policy(config=config)
        made = runner(graph, world, config)
        result, again = made.run(3), made.run(3)
        source = PolicySource(ExpertPolicy(config)).start()
        expected = EpisodeRunner(TableEnvironment(world), NodePort(config, source), EpisodeOptions()).run(3)
    assert result.success
    assert (expected.limited, expected.refused) == (0, 0), "the expert stays within all limits"
    assert result.trace.tips.shape == (result.steps + 1, arms, 3)
    assert result.trace.fingers.shape == (result.steps + 1, arms)
    assert 2 <= len(result.trace.images) <= 12
    assert result.trace.actions.shape[1] == source.spec.dimension
    assert result.steps == again.steps == expected.steps
    np.testing.assert_allclose(result.trace.actions, expected.trace.actions, atol=1e-6)


def test_in_lockstep_a_velocity_lasts_until_the_next_frame(graph, policy, monkeypatch):
    """The duration of an inference has no influence: simulated time stands still, and no frame is sent twice."""
    sent, publish = [], GraphPort.publish
    monkeypatch.setattr(module, "_RESEND", 0.1)
    monkeypatch.setattr(GraphPort, "publish", lambda port, *of: (sent.append(of[1]), publish(port, *of)))
    config, world = of_demo("--actions", "joint_velocity")
    with world:
        watched = policy(config=config)
        made = runner(graph, world, config)
        fast, slow_steps = made.run(3), iter([0.5] * 4)  # more than two periods of 0.1 s

        def slow(observation: Observation, chunk: ActionChunk) -> ActionChunk:
            time.sleep(next(slow_steps, 0.0))
            return chunk

        watched.answer = slow
        again = made.run(3)
    assert (again.steps, again.reason) == (fast.steps, "success")
    np.testing.assert_allclose(again.trace.actions, fast.trace.actions, atol=1e-9)
    assert len(sent) == len(set(sent)) > again.steps


@pytest.mark.parametrize(
    ("actions", "outputs"),
    [
        ("joint_position", ["control.output:=float64_multi_array"]),
        ("joint_position", ["control.output:=joint_trajectory"]),
        ("joint_velocity", ["control.output:=joint_velocity", "gripper.output:=float64_multi_array"]),
    ],
)
def test_the_arm_obeys_the_messages_of_other_drivers(graph, policy, actions, outputs):
    config, world = of_demo("--actions", actions, *(word for output in outputs for word in ("-p", output)))
    with world:
        policy(config=config)
        assert runner(graph, world, config).run(3).success


def test_unsupported_command_messages_are_refused_at_once(graph):
    config = load([config_file("demo")], ["control.output:=twist_stamped", "topics.gripper:=/gripper"])
    with pytest.raises(
        ConfigError, match=r"output on /arm/joint_command: found twist_stamped; .* accepts joint_state"
    ):
        GraphPort(graph, config.arms)


def test_one_arm_that_fails_fails_both(graph, policy):
    config, world = of_demo("--arms", "2", "--actions", "joint_position")

    def lame(observation: Observation, chunk: ActionChunk) -> ActionChunk:
        right = np.append(observation.state["joints"][7:], 1.0)  # stays where it is
        return replace(chunk, actions=np.concatenate([chunk.actions[:, :8], right[None]], axis=1))

    with world:
        policy(config=config, answer=lame)
        result = runner(graph, world, config, max_steps=30).run(3)
        assert world.object_positions()[world.scene.task.targets[0]][2] > 0.1, "the left arm did its part"
    assert (result.success, result.reason) == (False, "timeout")


def test_a_switched_instruction_is_followed_and_judged(graph, world, policy):
    watched = policy()
    result = runner(graph, world, switch_at=6).run(3)
    assert result.success
    assert result.trace.target == world.scene.objects[1].name
    assert watched.instructions[0] == world.scene.objects[0].name.join(["pick up the ", ""]).replace("_", " ")
    assert watched.instructions[-1] == result.instruction != watched.instructions[0]
    assert result.steps > 10


def test_blank_images_are_black_for_the_policy_but_not_in_the_report(graph, world, policy):
    watched = policy()
    result = runner(graph, world, blank=True, max_steps=3).run(0)
    assert max(watched.brightness) == 0.0
    assert (result.reason, result.steps) == ("timeout", 3)
    assert all(image.mean() > 50 for image in result.trace.images)


def test_an_episode_fails_if_inference_takes_too_long(graph, world, policy):
    release = threading.Event()

    def slow(observation: Observation, chunk: ActionChunk) -> ActionChunk:
        release.wait(20.0)
        return chunk

    policy(answer=slow)
    result = runner(graph, world, step_timeout=0.2).run(0)
    release.set()
    assert (result.success, result.reason, result.steps) == (False, "no_command", 0)


def fine(observation: Observation, chunk: ActionChunk) -> ActionChunk:
    return chunk


def broken(observation: Observation, chunk: ActionChunk) -> ActionChunk:
    raise RuntimeError("the model broke")


@pytest.mark.parametrize(
    ("options", "answer", "reason"),
    [
        (["control.armed:=false"], fine, r"disarmed.*control.armed:=true"),
        ([], broken, r"holding: inference_error \(RuntimeError: the model broke\)"),
    ],
)
def test_a_node_that_holds_or_is_disarmed_ends_the_run_with_the_reason(
    graph, world, policy, options, answer, reason
):
    policy(*options, answer=answer)
    began = time.monotonic()
    with pytest.raises(PolicyFailedError, match=reason):
        runner(graph, world, step_timeout=120.0).run(0)
    assert time.monotonic() - began < 40.0


@pytest.mark.parametrize("clock", [LOCKSTEP, WALL])
def test_a_stopped_node_ends_the_run_at_once(graph, world, policy, clock):
    def stopped(observation: Observation, chunk: ActionChunk) -> ActionChunk:
        watched.node.stop("a test said so")
        return chunk

    watched = policy("timeouts.frame_age:=0.0", answer=stopped)
    with pytest.raises(PolicyFailedError, match=r"stopped by operator_stop \(a test said so\)"):
        runner(graph, world, clock=clock, step_timeout=120.0).run(0)


def test_real_time_succeeds_while_the_clock_runs(graph, world, policy):
    """A loaded machine may be late and push the object away, so there are three tries with many steps."""
    policy("node.clock:=ros", "timeouts.frame_age:=5.0")
    real_time = runner(graph, world, clock=WALL, max_steps=300)
    reasons = []
    for seed in (1, 1, 1):
        began = time.monotonic()
        result = real_time.run(seed)
        assert time.monotonic() - began > 0.9 * 0.1 * result.steps, "simulated time was faster than the clock"
        assert len(result.trace.actions) > 5
        reasons.append(result.reason)
        if result.success:
            return
    pytest.fail(f"three failures: {reasons}")


def test_missing_topics_are_named(graph):
    with pytest.raises(VlaRosError, match="/arm/joint_command"):
        GraphPort(graph, DEMO.arms).wait_for_policy(0.2)
    with pytest.raises(VlaRosError, match="exited before it was ready"):
        GraphPort(graph, DEMO.arms, alive=lambda: False).wait_for_policy(5.0)


def test_a_dead_policy_node_ends_the_episode(graph, world):
    port = GraphPort(graph, DEMO.arms, timeout=5.0, alive=lambda: False)
    with pytest.raises(VlaRosError, match="exited during an episode"):
        EpisodeRunner(TableEnvironment(world), port, EpisodeOptions()).run(0)
