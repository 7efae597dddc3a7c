"""The one step, without graph and threads: what it makes of good and bad input, step by step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vla_ros.config import Config, build
from vla_ros.control.inputs import Inputs, Snapshot
from vla_ros.control.kinematics import Kinematics
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError, ImageError
from vla_ros.node.stepper import Stepper
from vla_ros.policies import Policy, Session
from vla_ros.types import ActionChunk, ActionSpec, JointState, Observation
from vla_ros.vision.decode import encode_image
from vla_ros.vision.lazy_images import Pictures
from vla_ros.vision.preprocess import Preprocessor

NAMES = tuple(f"joint_{number}" for number in range(1, 8))
JOINTS = JointState(NAMES, np.array([0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0]), 10)
STAMP = 1_700_000_000_123_456_789


class Forward(Policy):
    """Moves 1 cm along x at each of three steps, and remembers what it saw."""

    def __init__(self, **spec: object) -> None:
        self.spec = dataclasses.replace(ActionSpec(horizon=3), **spec)
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


def loaded(policy: Forward, options: Config | None = None) -> Stepper:
    stepper = Stepper(options or config(), policy)
    stepper.load()
    return stepper


def picture(top: int = 200, stamp: int = STAMP) -> bytes:
    image = np.zeros((60, 80, 3), np.uint8)
    image[:30, :, 0] = top
    return encode_image(image, stamp, "camera")


INPUTS = Snapshot(JOINTS, instruction="pick up the cube")


def test_a_trip_moves_the_tip_as_the_action_says_and_keeps_the_frames_stamp() -> None:
    policy = Forward()
    step = loaded(policy).step([picture()], INPUTS, 0.2)
    assert step.refused is None
    assert step.command is not None
    assert step.stamp == step.command.stamp == STAMP
    arm = Kinematics.from_urdf("demo")
    moved = arm.forward(step.command.positions[:7]).position - arm.forward(JOINTS.positions).position
    assert np.allclose(moved, [0.01, 0, 0], atol=2e-4)
    assert {"preprocess", "inference", "policy/decode", "control"} <= set(step.stages_ms)
    assert policy.seen[0].instruction == "pick up the cube"


def test_pictures_are_turned_and_resized_as_the_options_say() -> None:
    policy = Forward()
    loaded(policy, config(camera__orientation=["rotate_180"])).step([picture()], INPUTS, 0.2)
    image = policy.seen[0].images["image"]
    assert image.shape == (224, 224, 3)
    assert image[:100, :, 0].max() == 0
    assert image[-100:, :, 0].min() == 200


def test_a_chunk_is_executed_step_by_step_before_the_policy_is_asked_again() -> None:
    policy = Forward()
    stepper = loaded(policy)
    assert stepper.wants_frame
    assert stepper.step([picture()], INPUTS, 0.2).index == 0
    stepper.schedule.executed()
    indices = []
    while not stepper.wants_frame:
        indices.append(stepper.next_command(JOINTS, 0.2).index)
        stepper.schedule.executed()
    assert indices == [1, 2]
    assert len(policy.seen) == 1


def test_a_step_that_was_not_sent_is_not_consumed() -> None:
    stepper = loaded(Forward())
    stepper.step([picture()], INPUTS, 0.2)
    assert stepper.next_command(JOINTS, 0.2).index == 0
    assert stepper.next_command(JOINTS, 0.2).index == 0


@pytest.mark.parametrize("keep", [0, 3, 20, 70, 1000])
def test_a_message_that_was_cut_off_is_an_error_that_names_the_topic(keep: int) -> None:
    stepper = loaded(Forward())
    with pytest.raises(ImageError, match="/camera/image_raw"):
        stepper.step([picture()[:keep]], INPUTS, 0.2)
    assert stepper.step([picture()], INPUTS, 0.2).command is not None


@pytest.mark.parametrize(
    ("inputs", "frames", "reason"),
    [
        (Snapshot(JOINTS), [picture()], Reason.NO_INSTRUCTION),
        (INPUTS, [None], Reason.INPUT_MISSING),
    ],
)
def test_what_is_missing_is_named(inputs: Snapshot, frames: list[bytes | None], reason: Reason) -> None:
    with pytest.raises(Refused) as caught:
        loaded(Forward()).step(frames, inputs, 0.2)
    assert caught.value.reason is reason


def test_feeds_and_joints_that_a_policy_needs_are_waited_for() -> None:
    stepper = loaded(Forward(needs_joints=True, state_keys=("objects",)))
    with pytest.raises(Refused, match="no usable joint state"):
        stepper.step([picture()], Snapshot(instruction="go"), 0.2)
    with pytest.raises(Refused, match="objects"):
        stepper.step([picture()], INPUTS, 0.2)
    ready = Snapshot(JOINTS, {"objects": dataclasses.replace(JOINTS, stamp=STAMP)}, "go")
    assert stepper.step([picture()], ready, 0.2).command is not None


def test_a_feed_that_fell_silent_is_not_shown_to_the_policy() -> None:
    stepper = loaded(Forward(state_keys=("wrench",)))

    def asked(behind: float) -> Snapshot:
        feed = JointState(("f",), np.zeros(1), STAMP - round(behind * 1e9))
        return dataclasses.replace(INPUTS, state={"wrench": feed})

    stepper.observe([picture()], asked(0.9))
    with pytest.raises(Refused, match=r"'wrench' is 1.1 s older.*timeouts.joint_state_age") as refused:
        stepper.observe([picture()], asked(1.1))
    assert refused.value.reason is Reason.INPUT_MISSING
    stepper = loaded(Forward(state_keys=("wrench",)), config(timeouts__joint_state_age=0.0))
    stepper.observe([picture()], asked(100.0))


def test_an_answer_that_is_no_action_never_becomes_a_command() -> None:
    policy = Forward()
    stepper = loaded(policy)
    for answer in (
        np.full((3, 7), np.nan),
        np.zeros((3, 6)),
        np.zeros((9, 7)),
        np.zeros(7),
        np.full((1, 7), np.inf),
    ):
        policy.answer = answer
        with pytest.raises(Refused) as caught:
            stepper.step([picture()], INPUTS, 0.2)
        assert caught.value.reason is Reason.ACTION_INVALID
        assert stepper.wants_frame
    policy.error = ValueError("tensor of size 3")
    with pytest.raises(Refused, match="ValueError: tensor of size 3"):
        stepper.step([picture()], INPUTS, 0.2)


@pytest.mark.parametrize("answer", [np.zeros((1, 7)), None, ActionChunk([[0.0] * 7], STAMP)])
def test_an_answer_of_a_wrong_type_is_refused_in_words(answer: object) -> None:
    policy = Forward()
    policy.infer = lambda *_: answer
    with pytest.raises(Refused, match="expected an ActionChunk") as refused:
        loaded(policy).step([picture()], INPUTS, 0.2)
    assert refused.value.reason is Reason.ACTION_INVALID


def test_without_a_joint_state_the_action_is_shown_and_the_command_refused() -> None:
    step = loaded(Forward()).step([picture()], Snapshot(instruction="go"), 0.2)
    assert step.action is not None
    assert step.command is None
    assert step.refused is not None


def test_the_delta_counts_from_the_pose_at_the_frames_stamp() -> None:
    stepper = loaded(Forward())
    moved = JointState(NAMES, JOINTS.positions + np.array([0.02, 0, 0, 0, 0, 0, 0]), 20)
    step = stepper.step([picture()], INPUTS, 0.2, reference=JOINTS, newest=lambda: moved)
    assert step.command is not None
    arm = Kinematics.from_urdf("demo")
    expected = arm.forward(JOINTS.positions).position + np.array([0.01, 0, 0])
    assert np.allclose(arm.forward(step.command.positions[:7]).position, expected, atol=3e-4)


def test_a_picture_that_no_camera_gives_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="wrist"):
        loaded(Forward(image_keys=("image", "wrist")))


def test_a_reset_forgets_the_plan() -> None:
    policy = Forward()
    stepper = loaded(policy)
    stepper.step([picture()], INPUTS, 0.2)
    stepper.reset()
    assert stepper.wants_frame
    assert policy.resets == 1


def test_a_new_task_does_not_let_go_of_what_is_gripped() -> None:
    """A hold right after a new instruction tells the fingers what they were told, not where they were measured."""
    policy = Forward()
    policy.answer = np.tile([0.0, 0, 0, 0, 0, 0, 0.0], (3, 1))  # close
    stepper = loaded(policy, config(robot__gripper_joint_names=["finger_left"]))
    gripping = JointState((*NAMES, "finger_left"), np.array([*JOINTS.positions, 0.013]), 10)
    stepper.step([picture()], Snapshot(gripping, instruction="pick up the cube"), 0.2)
    stepper.executed()
    stepper.new_task()
    assert stepper.wants_frame
    assert policy.resets == 1
    assert stepper.hold(gripping).positions[-1] == 0.0, "closed on the object, which keeps the fingers at 13 mm"
    stepper.forget_commands()
    assert stepper.hold(gripping).positions[-1] == 0.013, "somebody else had the gripper: touch nothing"


def test_fewer_steps_per_chunk_may_be_asked_for_in_the_middle_of_one() -> None:
    policy = Forward()
    stepper = loaded(policy)
    assert stepper.step([picture()], INPUTS, 0.2).command is not None
    stepper.executed()
    assert not stepper.wants_frame
    stepper.configure(config(control__execute_steps=1))
    assert stepper.next_command(JOINTS, 0.2).index == 1
    stepper.executed()
    assert stepper.wants_frame


def test_ensembling_goes_on_when_other_options_change() -> None:
    stepper = loaded(Forward(), config(control__chunk_blending="ensemble"))
    stepper.configure(config(control__chunk_blending="ensemble", control__rate_hz=3.0))
    stepper.step([picture()], INPUTS, 0.2)
    stepper.executed()
    assert stepper.wants_frame, "ACT asks after every step"


def test_options_that_may_change_take_effect_with_the_next_step() -> None:
    stepper = loaded(Forward())
    stepper.configure(config(limits__max_translation_step=0.001))
    step = stepper.step([picture()], INPUTS, 0.2)
    assert step.command is not None
    arm = Kinematics.from_urdf("demo")
    moved = arm.forward(step.command.positions[:7]).position - arm.forward(JOINTS.positions).position
    assert np.linalg.norm(moved) < 0.0011


class TestInputs:
    def test_the_joint_state_nearest_to_a_stamp_is_found(self) -> None:
        inputs = Inputs()
        assert inputs.joints_at(0) is None
        for stamp in range(0, 10**9, 10**7):
            inputs.set_joints(dataclasses.replace(JOINTS, stamp=stamp))
        found = inputs.joints_at(123_456_789)
        assert found is not None
        assert found.stamp == 120_000_000
        assert inputs.joints_at(5 * 10**9) is None

    def test_blanks_are_no_instruction(self) -> None:
        assert Inputs("  \n").snapshot.instruction == ""

    def test_a_new_instruction_begins_a_new_epoch_and_the_same_one_does_not(self) -> None:
        inputs = Inputs("a")
        assert not inputs.set_instruction("a")
        assert inputs.snapshot.epoch == 0
        assert inputs.set_instruction("b")
        assert inputs.snapshot.epoch == 1

    def test_waiting_for_a_stamp_ends_with_it_or_with_the_time(self) -> None:
        inputs = Inputs()
        inputs.set_joints(JOINTS)
        assert inputs.wait_for_stamp(10, (), 0.01)
        assert not inputs.wait_for_stamp(11, (), 0.01)
        assert not inputs.wait_for_stamp(10, ("objects",), 0.01)
        inputs.set_state("objects", JOINTS)
        assert inputs.wait_for_stamp(10, ("objects",), 0.01)


def test_a_picture_is_resized_when_the_policy_looks_and_its_time_is_counted_as_preprocessing() -> None:
    class Looking(Forward):
        def infer(self, session: Session, observation: Observation) -> ActionChunk:
            before = dict(observation.images)
            assert all(observation.images[key] is image for key, image in before.items()), "prepared once"
            return super().infer(session, observation)

    blind, looking = Forward(), Looking()
    for policy, prepared in ((blind, 0), (looking, 1)):
        step = loaded(policy).step([picture()], INPUTS, 0.2)
        assert step.observation is not None
        images = step.observation.images
        assert isinstance(images, Pictures)
        assert images.prepared == prepared
        assert (images.spent_ms > 0) == bool(prepared)
        assert step.stages_ms["preprocess"] >= images.spent_ms
        assert step.stages_ms["inference"] >= 0
        assert (images["image"] == Preprocessor(config().camera)(picture()).image).all()
