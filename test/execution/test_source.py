import numpy as np
import pytest
from live_loop import NAMES, POSITIONS, LiveLoop, TimedPolicy, every

from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.reasons import Reason, Refused
from vla_ros.execution.source import ActionSource
from vla_ros.policies.base import Lost, Session
from vla_ros.types import ActionChunk, FloatArray, JointState, Observation

RECORDED = POSITIONS + np.linspace(0.01, 0.06, 6)[:, None] * [1, 0, 0, 0, 0, 0, 0]


class Replayed(ActionSource):
    """Replays recorded joint positions, three per frame."""

    def __init__(self, rows: FloatArray) -> None:
        self.spec = PolicySpec(action=parse_components("arm.joint_position", action=True), dimension=0, horizon=3)
        self.rows, self.begun = rows, 0

    def infer(self, observation: Observation) -> ActionChunk:
        if not len(self.rows):
            raise Refused(Reason.INPUT_MISSING, "the recording has ended")
        chunk, self.rows = self.rows[:3], self.rows[3:]
        return ActionChunk(chunk, observation.stamp)

    def reset(self) -> None:
        self.begun += 1


def test_a_recording_moves_the_arm_and_holds_at_its_end() -> None:
    source = Replayed(RECORDED)
    live = LiveLoop(None, every(1 / 30, 60), source, control__schedule="sync")
    live.follows = True
    live.run(1.5)
    np.testing.assert_allclose([command.positions for _, command in live.sent], RECORDED, atol=1e-9)
    assert np.diff([at for at, _ in live.sent]).min() > 0.089, "control.rate_hz"
    assert live.state == ("holding", {Reason.INPUT_MISSING})
    assert source.begun == 1
    live.inputs.set_instruction("again")
    live.run(0.2)
    assert source.begun == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (OSError("the recording cannot be read"), Reason.INFERENCE_ERROR),
        (np.full((1, 7), np.nan), Reason.ACTION_INVALID),
        (np.zeros((4, 7)), Reason.ACTION_INVALID),
    ],
)
def test_what_a_source_does_wrong_holds_the_arm(answer: OSError | FloatArray, reason: Reason) -> None:
    class Wrong(Replayed):
        def infer(self, observation: Observation) -> ActionChunk:
            if isinstance(answer, OSError):
                raise answer
            return ActionChunk(answer, observation.stamp)

    live = LiveLoop(None, every(1 / 30, 30), Wrong(RECORDED))
    live.run(0.5)
    assert live.state == ("holding", {reason})
    assert not live.sent


def test_a_source_that_lost_what_it_depends_on_holds_the_arm() -> None:
    class Fading(Replayed):
        lost = Lost(60.0, "the hand controller is switched off")

    live = LiveLoop(None, every(1 / 30, 30), Fading(np.tile(RECORDED, (10, 1))), control__schedule="sync")
    live.run(0.15)
    assert live.state == ("holding", {Reason.SERVER_LOST})
    assert not live.sent


def test_a_new_task_resets_source_and_plan_but_keeps_the_grip() -> None:
    """A hold right after a new instruction tells the fingers what they were told, not where they were measured."""
    resets = []

    class Counting(Session):
        def reset(self) -> None:
            resets.append(self)

    class CountingPolicy(TimedPolicy):
        def start_session(self) -> Session:
            return Counting()

    policy = CountingPolicy(horizon=3)
    policy.last = -1.0  # closed
    live = LiveLoop(policy, every(0.1, 3), robot__gripper_joint_names=["finger_left"])
    finger = (*NAMES, "finger_left")
    live.states.accept(JointState(finger, np.append(POSITIONS, 0.013), live.clock.ros()), live.clock.ros())
    live.run(0.35)
    assert not live.pipeline.schedule.wants_chunk
    before = len(resets)
    live.inputs.set_instruction("another")
    live.loop.run_once()
    assert live.pipeline.schedule.wants_chunk
    assert len(resets) == before + 1
    gripping = JointState(finger, np.append(POSITIONS, 0.013), live.clock.ros())
    [held] = live.pipeline.controller.hold(gripping)[0]
    assert held.positions[-1] == 0.0, "closed on the object, which keeps the fingers at 13 mm"


def test_execute_steps_may_shrink_in_the_middle_of_a_chunk() -> None:
    live = LiveLoop(TimedPolicy(3), every(0.1, 1), control__schedule="sync")
    while not live.sent:
        live.loop.run_once()
    assert live.pipeline.schedule.left_until_inference == 2
    live.options.current = build({"control.execute_steps": 2}, live.options.current)
    live.run(0.1)
    assert [step.index for step in live.steps] == [0, 1]
    assert live.pipeline.schedule.wants_chunk
