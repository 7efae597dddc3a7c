import dataclasses

import numpy as np
import pytest

from vla_ros.config import Config, build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.control.inputs import Snapshot
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError, ImageError
from vla_ros.execution.source import PolicySource
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.inference import first_step, infer
from vla_ros.node.pipeline import ActionPipeline, build_pipeline
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, JointState, Observation
from vla_ros.vision.messages import encode_image
from vla_ros.vision.preprocess import LazyImages, Preprocessor, process
from vla_ros.vision.processors import ResizeNaive

NAMES = tuple(f"joint_{number}" for number in range(1, 8))
STAMP = 1_700_000_000_123_456_789
JOINTS = JointState(NAMES, np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0]), STAMP - 10)


class Forward(Policy):
    """Moves 1 cm along x at each of three steps, and remembers what it saw."""

    def __init__(self, **spec: object) -> None:
        self.spec = dataclasses.replace(PolicySpec((ImageFeature("image", ResizeNaive()),), horizon=3), **spec)
        self.seen: list[Observation] = []
        self.resets = 0
        self.answer = np.tile([0.01, 0, 0, 0, 0, 0, 1.0], (3, 1))
        self.error: Exception | None = None

    def start_session(self) -> Session:
        return Counting(self)

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        self.seen.append(observation)
        if self.error is not None:
            raise self.error
        return ActionChunk(self.answer, observation.stamp, stages_ms={"decode": 1.5})


class Counting(Session):
    """Counts how often it had to forget."""

    def __init__(self, policy: Forward) -> None:
        self.policy = policy

    def reset(self) -> None:
        self.policy.resets += 1


def config(**values: object) -> Config:
    return build({"robot.urdf": "demo", **{name.replace("__", "."): value for name, value in values.items()}})


STATE = (StateFeature("proprio", parse_components("arm.joint_position + topic.wrench")),)
TOPICS = config(robot__state_topics=["wrench=/wrench"])


def loaded(policy: Forward, options: Config | None = None) -> tuple[PolicySource, ActionPipeline]:
    source = PolicySource(policy)
    source.load()
    return source, build_pipeline(options or config(), source.spec)


def message(top: int = 200, stamp: int = STAMP) -> bytes:
    image = np.zeros((60, 80, 3), np.uint8)
    image[:30, :, 0] = top
    return encode_image(image, stamp, "camera")


INPUTS = Snapshot(JOINTS, instruction="pick up the cube")


def test_the_command_moves_the_tip_by_the_action_and_carries_the_stamp_of_the_frame() -> None:
    policy = Forward()
    step = first_step(*loaded(policy), [message()], INPUTS, 0.2)
    assert step.refused is None
    assert step.stamp == step.commands[0].stamp == STAMP
    arm = Kinematics.from_urdf("demo")
    moved = arm.forward(step.commands[0].positions[:7]).position - arm.forward(JOINTS.positions).position
    assert np.allclose(moved, [0.01, 0, 0], atol=2e-4)
    assert {"preprocess", "inference", "policy/decode", "control"} <= set(step.stages_ms)
    assert policy.seen[0].instruction == "pick up the cube"


@pytest.mark.parametrize("keep", [0, 3, 20, 70, 1000])
def test_a_truncated_message_raises_an_error_that_names_the_topic(keep: int) -> None:
    parts = loaded(Forward())
    with pytest.raises(ImageError, match="/camera/image_raw"):
        first_step(*parts, [message()[:keep]], INPUTS, 0.2)
    assert first_step(*parts, [message()], INPUTS, 0.2).commands


@pytest.mark.parametrize(
    ("inputs", "frames", "reason"),
    [(Snapshot(JOINTS), [message()], Reason.NO_INSTRUCTION), (INPUTS, [None], Reason.INPUT_MISSING)],
)
def test_a_missing_input_is_refused_with_its_reason(
    inputs: Snapshot, frames: list[bytes | None], reason: Reason
) -> None:
    with pytest.raises(Refused) as caught:
        first_step(*loaded(Forward()), frames, inputs, 0.2)
    assert caught.value.reason is reason


def test_missing_topics_and_joints_are_refused() -> None:
    parts = loaded(Forward(state=STATE), TOPICS)
    with pytest.raises(Refused, match="no usable joint state"):
        first_step(*parts, [message()], Snapshot(instruction="go"), 0.2)
    with pytest.raises(Refused, match="wrench"):
        first_step(*parts, [message()], INPUTS, 0.2)
    ready = Snapshot(JOINTS, {"wrench": dataclasses.replace(JOINTS, stamp=STAMP)}, "go")
    assert first_step(*parts, [message()], ready, 0.2).commands


def test_a_stale_topic_is_refused() -> None:
    observer = loaded(Forward(state=STATE), TOPICS)[1].observer

    def asked(behind: float) -> Snapshot:
        wrench = JointState(("f",), np.zeros(1), STAMP - round(behind * 1e9))
        return dataclasses.replace(INPUTS, state={"wrench": wrench})

    observer.observe([message()], asked(0.9))
    with pytest.raises(Refused, match=r"topic.wrench: 1.1 s older.*timeouts.joint_state_age") as refused:
        observer.observe([message()], asked(1.1))
    assert refused.value.reason is Reason.INPUT_MISSING
    any_age = config(robot__state_topics=["wrench=/w"], timeouts__joint_state_age=0.0)
    loaded(Forward(state=STATE), any_age)[1].observer.observe([message()], asked(100.0))


@pytest.mark.parametrize("answer", [np.zeros((1, 7)), None, ActionChunk([[0.0] * 7], STAMP)])
def test_an_answer_of_a_wrong_type_is_refused(answer) -> None:
    policy = Forward()
    policy.infer = lambda *_: answer
    with pytest.raises(Refused, match="expected an ActionChunk") as refused:
        first_step(*loaded(policy), [message()], INPUTS, 0.2)
    assert refused.value.reason is Reason.ACTION_INVALID


def test_without_a_joint_state_there_is_an_action_and_no_command() -> None:
    step = first_step(*loaded(Forward()), [message()], Snapshot(instruction="go"), 0.2)
    assert step.action is not None
    assert not step.commands
    assert step.refused is not None


def test_a_delta_counts_from_the_pose_at_the_stamp_of_the_frame() -> None:
    source, pipeline = loaded(Forward(), config(control__delta_from="measured"))
    moved = JointState(NAMES, JOINTS.positions + np.array([0.02, 0, 0, 0, 0, 0, 0]), 20)
    inference = infer(source, pipeline, [message()], INPUTS)
    pipeline.schedule.load(inference.chunk)
    step = pipeline.controller.make_step(pipeline.schedule.next(), moved, 0.2, JOINTS, inference)
    arm = Kinematics.from_urdf("demo")
    expected = arm.forward(JOINTS.positions).position + np.array([0.01, 0, 0])
    assert np.allclose(arm.forward(step.commands[0].positions[:7]).position, expected, atol=3e-4)


def test_an_image_that_no_camera_provides_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="wrist"):
        loaded(Forward(images=(ImageFeature("image"), ImageFeature("wrist"))))


def test_a_hold_keeps_the_grip_until_the_commands_are_forgotten() -> None:
    policy = Forward()
    policy.answer = np.tile([0.0, 0, 0, 0, 0, 0, 0.0], (3, 1))  # close
    source, pipeline = loaded(policy, config(robot__gripper_joint_names=["finger_left"]))
    gripping = JointState((*NAMES, "finger_left"), np.array([*JOINTS.positions, 0.013]), 10)
    first_step(source, pipeline, [message()], Snapshot(gripping, instruction="pick up the cube"), 0.2)
    pipeline.controller.sent()
    held = pipeline.controller.hold(gripping)[0][0]
    assert held.positions[-1] == 0.0, "closed on the object, which keeps the fingers at 13 mm"
    pipeline.controller.reset()
    held = pipeline.controller.hold(gripping)[0][0]
    assert held.positions[-1] == 0.013, "somebody else had the gripper: touch nothing"


def test_an_image_is_resized_on_first_access_and_its_time_counts_as_preprocessing() -> None:
    class Looking(Forward):
        def infer(self, session: Session, observation: Observation) -> ActionChunk:
            before = dict(observation.images)
            assert all(observation.images[key] is image for key, image in before.items()), "prepared once"
            return super().infer(session, observation)

    blind, looking = Forward(), Looking()
    for policy, prepared in ((blind, 0), (looking, 1)):
        step = first_step(*loaded(policy), [message()], INPUTS, 0.2)
        images = step.observation.images
        assert isinstance(images, LazyImages)
        assert images.prepared == prepared
        assert (images.spent_ms > 0) == bool(prepared)
        assert step.stages_ms["preprocess"] >= images.spent_ms
        assert step.stages_ms["inference"] >= 0
        assert (images["image"] == process(Preprocessor(config().camera, policy.spec)(message()))).all()
