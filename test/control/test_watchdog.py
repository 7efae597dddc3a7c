from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.config import Config, LiveConfig, TimeoutsConfig
from vla_ros.control.clock import Now
from vla_ros.control.reasons import Level, Reason
from vla_ros.control.watchdog import Watchdog

TIMEOUTS = TimeoutsConfig(
    camera=0.5,
    joint_state=0.4,
    inference=1.0,
    frame_age=0.8,
    joint_state_age=0.6,
    frozen_frames=3,
    driver=1.0,
    heartbeat=0.3,
    clock_jump=0.5,
)
EPOCH = 1_700_000_000_000_000_000


class World:
    """Two clocks and a watchdog."""

    def __init__(self, timeouts: TimeoutsConfig = TIMEOUTS, *, simulated: bool = False, cameras: int = 1) -> None:
        self.cameras = tuple(f"camera_{number}" for number in range(cameras))
        self.options = LiveConfig(Config(timeouts=timeouts))
        self.watchdog = Watchdog(self.options, self.cameras, simulated=simulated)
        self.steady = 5_000_000_000
        self.ros = EPOCH
        self.shown = 0

    @property
    def now(self) -> Now:
        return Now(self.steady, self.ros)

    @property
    def active(self) -> set[Reason]:
        return set(self.watchdog.active(self.now))

    def wait(self, seconds: float, rate: float = 1.0) -> None:
        """Let time pass; the ROS clock runs ``rate`` times as fast."""
        self.steady += round(seconds * 1e9)
        self.ros += round(seconds * rate * 1e9)

    def frame(self, camera: str = "camera_0", age: float = 0.0, digest: int | None = None) -> Reason | None:
        self.shown += 1
        stamp = self.ros - round(age * 1e9)
        return self.watchdog.check_frame(camera, stamp, self.now, self.shown if digest is None else digest)

    def joints(self, age: float = 0.0, wrong: str = "") -> bool:
        return self.watchdog.check_joint_state(self.ros - round(age * 1e9), self.now, wrong)

    def all_well(self) -> "World":
        for camera in self.cameras:
            self.frame(camera)
        self.joints()
        self.watchdog.see_driver(1, self.now)
        self.watchdog.see_heartbeat(self.now)
        assert self.active == set()
        return self

    def run(self, seconds: float, without: str = "", step: float = 0.05) -> None:
        """Report all inputs every ``step`` seconds, except ``without``."""
        for _ in range(round(seconds / step)):
            self.wait(step)
            for camera in self.cameras:
                if without != camera:
                    self.frame(camera)
            if without != "joints":
                self.joints()
            if without != "driver":
                self.watchdog.see_driver(1, self.now)
            if without != "heartbeat":
                self.watchdog.see_heartbeat(self.now)


def test_before_the_first_messages_every_needed_input_is_missing() -> None:
    assert World().active == {
        Reason.CAMERA_STALE,
        Reason.JOINT_STATE_STALE,
        Reason.DRIVER_MISSING,
        Reason.HEARTBEAT_MISSING,
    }


def test_with_all_inputs_in_time_no_reason_is_active() -> None:
    world = World().all_well()
    for _ in range(40):
        world.run(0.25)
        assert world.active == set()


@pytest.mark.parametrize(
    ("without", "timeout", "reason"),
    [
        ("camera_1", 0.5, Reason.CAMERA_STALE),
        ("joints", 0.4, Reason.JOINT_STATE_STALE),
        ("driver", 1.0, Reason.DRIVER_GONE),
        ("heartbeat", 0.3, Reason.HEARTBEAT_LOST),
    ],
)
def test_a_stale_input_is_detected_after_its_timeout_and_not_before(
    without: str, timeout: float, reason: Reason
) -> None:
    world = World(cameras=2).all_well()
    world.run(timeout, without)
    assert world.active == set(), "too early"
    world.run(0.05, without)
    assert world.active == {reason}
    world.run(0.05)
    assert world.active == set(), "it came again"


def test_the_detail_says_which_camera_and_for_how_long() -> None:
    world = World(cameras=2).all_well()
    world.run(1.0, "camera_1")
    assert world.watchdog.active(world.now) == {Reason.CAMERA_STALE: "camera_1: none for 1 s"}


def test_a_heartbeat_is_needed_only_with_its_timeout() -> None:
    assert Reason.HEARTBEAT_MISSING not in World(replace(TIMEOUTS, heartbeat=0.0)).active


def test_repeated_pixels_are_a_frozen_camera() -> None:
    world = World().all_well()
    for number in range(3):
        world.run(0.0)
        world.wait(0.05)
        assert world.active == set(), f"{number} equal frames"
        assert world.frame(digest=4711) is None
    world.joints()
    assert world.active == {Reason.CAMERA_FROZEN}
    world.wait(0.05)
    world.frame()
    assert world.active == set()


def test_frozen_frames_zero_allows_a_still_scene() -> None:
    world = World(replace(TIMEOUTS, frozen_frames=0)).all_well()
    for _ in range(50):
        world.run(0.05)
        world.wait(0.01)
        world.frame(digest=1)
    assert world.active == set()


def test_a_camera_that_keeps_repeating_one_frame_is_stale() -> None:
    world = World().all_well()
    stamp = world.ros
    for _ in range(7):
        world.run(0.08, "camera_0")
        world.watchdog.check_frame("camera_0", stamp, world.now)
    assert Reason.CAMERA_STALE in world.active


def test_a_camera_that_restarts_with_earlier_stamps_is_accepted_after_its_timeout() -> None:
    world = World(replace(TIMEOUTS, frame_age=0.0)).all_well()
    back = world.ros - 3_000_000_000
    world.run(0.45, "camera_0")
    assert world.watchdog.check_frame("camera_0", back, world.now) is Reason.FRAME_OUT_OF_ORDER
    world.run(0.1, "camera_0")
    assert world.watchdog.check_frame("camera_0", back + 1, world.now) is None
    assert world.active == set()


@pytest.mark.parametrize(("age", "reason"), [(0.81, Reason.FRAME_OLD), (-0.81, Reason.FRAME_FROM_FUTURE)])
def test_a_frame_of_the_wrong_age_holds_until_a_good_one(age: float, reason: Reason) -> None:
    world = World(replace(TIMEOUTS, camera=5.0)).all_well()
    world.run(0.9, "camera_0")
    assert world.frame(age=age) is reason
    assert world.active == {reason}
    assert world.frame(age=0.79) is None
    assert world.active == set()


def test_frames_without_a_stamp_are_accepted() -> None:
    world = World(replace(TIMEOUTS, frame_age=0.0)).all_well()
    for _ in range(20):
        world.run(0.05, "camera_0")
        world.shown += 1
        assert world.watchdog.check_frame("camera_0", 0, world.now, world.shown) is None
    assert world.active == set()


@pytest.mark.parametrize(
    ("age", "cause"), [(0.9, "do the clocks agree"), (EPOCH / 1e9 - 300.0, "stamps with another clock")]
)
def test_the_message_about_a_wrong_age_says_what_to_check(age: float, cause: str) -> None:
    """Frames from a host with another clock, and from a driver that stamps with the time since boot."""
    world = World()
    assert world.frame(age=age) is Reason.FRAME_OLD
    text = world.watchdog.active(world.now)[Reason.FRAME_OLD]
    assert cause in text
    assert "timeouts.frame_age; 0 accepts any" in text


def test_any_age_is_accepted_where_frame_age_is_zero() -> None:
    world = World(replace(TIMEOUTS, frame_age=0.0))
    assert world.frame(age=1000.0) is None


def test_late_and_repeated_joint_states_are_ignored() -> None:
    world = World().all_well()
    stamp = world.ros
    for _ in range(9):
        world.run(0.05, "joints")
        assert not world.joints(age=0.61), "too old"
        assert not world.watchdog.check_joint_state(stamp, world.now), "again"
    assert world.active == {Reason.JOINT_STATE_STALE}


def test_joint_states_from_the_future_are_ignored_and_reported() -> None:
    world = World().all_well()
    for _ in range(12):
        world.wait(0.05)
        world.frame()
        assert not world.joints(age=-30.0)
    assert "30 s ahead of this clock" in world.watchdog.active(world.now)[Reason.JOINT_STATE_STALE]


def test_joint_states_without_a_stamp_are_accepted() -> None:
    world = World().all_well()
    for _ in range(20):
        world.run(0.05, "joints")
        assert world.watchdog.check_joint_state(0, world.now)
    assert world.active == set()


def test_an_arm_without_joint_states_needs_none() -> None:
    watchdog = Watchdog(LiveConfig(Config(timeouts=TIMEOUTS)), (), ())
    assert set(watchdog.active(Now(1, EPOCH))) == {Reason.DRIVER_MISSING, Reason.HEARTBEAT_MISSING}


def test_a_late_inference_holds_until_one_is_in_time() -> None:
    world = World().all_well()
    world.watchdog.inference_began(world.now)
    world.run(1.0)
    assert world.active == set()
    world.run(0.1)
    assert world.active == {Reason.INFERENCE_LATE}, "still inferring"
    assert world.watchdog.inference_ended(world.now) is False
    world.run(0.1)
    assert world.active == {Reason.INFERENCE_LATE}, "its answer was dropped"
    world.watchdog.inference_began(world.now)
    world.run(0.1)
    assert world.watchdog.inference_ended(world.now) is True
    assert world.active == set()


@pytest.mark.parametrize("jump", [0.6, -0.6, 3600.0, -3600.0])
def test_a_clock_jump_holds_until_every_input_was_seen_again(jump: float) -> None:
    world = World(replace(TIMEOUTS, frame_age=0.0, joint_state_age=0.0)).all_well()
    world.run(0.1)
    world.ros += round(jump * 1e9)
    world.wait(0.02)
    assert Reason.CLOCK_JUMP in world.active
    world.wait(0.02)
    assert world.frame() is None, "stamps count anew"
    assert world.active == {Reason.CLOCK_JUMP}, "no joint state since"
    assert world.joints()
    assert world.active == set()


def test_a_clock_that_is_slewed_has_not_jumped() -> None:
    world = World().all_well()
    world.ros += 400_000_000
    world.run(0.05)
    assert world.active == set()


def test_a_suspended_process_sees_stale_inputs_and_no_jump() -> None:
    world = World().all_well()
    world.wait(30.0)
    assert Reason.CLOCK_JUMP not in world.active
    assert Reason.CAMERA_STALE in world.active


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0, 20.0])
def test_simulated_time_may_stand_still_and_run_fast(rate: float) -> None:
    world = World(simulated=True).all_well()
    for _ in range(20):
        world.wait(0.1, rate)
        world.joints()
        world.frame()
        assert Reason.CLOCK_JUMP not in world.active


@pytest.mark.parametrize("jump", [-0.001, 30.0])
def test_simulated_time_may_not_go_back_nor_leap(jump: float) -> None:
    world = World(simulated=True).all_well()
    world.ros += round(jump * 1e9)
    world.wait(0.01, rate=0.0)
    assert Reason.CLOCK_JUMP in world.active


def test_simulated_time_that_begins_has_not_jumped() -> None:
    world = World(simulated=True)
    world.ros = 0
    assert Reason.CLOCK_JUMP not in world.active
    world.wait(0.1)
    world.ros = 12_000_000_000
    assert Reason.CLOCK_JUMP not in world.active


def test_a_time_that_another_thread_read_earlier_is_no_jump() -> None:
    world = World(simulated=True).all_well()
    early = world.now
    world.wait(0.05)
    assert world.active == set()
    world.watchdog.see_heartbeat(early)
    assert set(world.watchdog.active(early)) == set()


def test_new_timeouts_apply_at_once() -> None:
    world = World().all_well()
    world.run(0.3, "camera_0")
    world.options.current = Config(timeouts=replace(TIMEOUTS, camera=0.1))
    assert world.active == {Reason.CAMERA_STALE}


@given(st.lists(st.sampled_from(["frame", "joints", "wait", "jump", "late", "query"]), max_size=40))
def test_after_any_history_inputs_in_time_clear_every_reason(events: list[str]) -> None:
    world = World()
    for event in events:
        if event == "frame":
            world.frame(age=0.1 * (world.shown % 12))
        elif event == "joints":
            world.joints(wrong="x" if world.steady % 3 == 0 else "")
        elif event == "wait":
            world.wait(0.37)
        elif event == "jump":
            world.ros -= 2_000_000_000
        elif event == "late":
            world.watchdog.inference_began(world.now)
            world.wait(1.5)
            world.watchdog.inference_ended(world.now)
        else:
            assert all(reason.level is not Level.COUNT for reason in world.active)
    world.watchdog.inference_began(world.now)
    world.watchdog.inference_ended(world.now)
    world.run(1.0)
    once = {Reason.CLOCK_JUMP, Reason.JOINT_STATE_INVALID}
    assert world.active <= once, "told once, where nobody asked before"
    assert world.active == set()


def test_undecodable_frames_make_a_camera_stale() -> None:
    world = World().all_well()
    for _ in range(20):
        world.run(0.05)
        world.watchdog.see_images(world.now, readable=False)
    assert world.active == {Reason.CAMERA_STALE}
    world.watchdog.see_images(world.now, readable=True)
    assert world.active == set()


def test_one_undecodable_frame_among_good_ones_does_not_matter() -> None:
    world = World().all_well()
    for number in range(20):
        world.run(0.05)
        world.watchdog.see_images(world.now, readable=number % 2 == 0)
    assert world.active == set()


def test_a_jump_is_reported_even_if_all_inputs_were_seen_again_meanwhile() -> None:
    world = World().all_well()
    world.wait(0.02)
    world.ros += 10**10
    world.frame()
    world.joints()
    assert world.active == {Reason.CLOCK_JUMP}
    world.run(0.02)
    assert world.active == set()


def test_a_single_wrong_joint_state_is_named_once_even_if_a_good_one_follows_at_once() -> None:
    world = World()
    world.watchdog.see_driver(1, world.now)
    world.watchdog.see_heartbeat(world.now)
    assert world.joints()
    assert Reason.JOINT_STATE_INVALID not in world.active
    world.wait(0.01)
    assert not world.joints(wrong="joint 'j2' jumps")
    world.wait(0.01)
    assert world.joints(), "it may be used"
    found = world.watchdog.active(world.now)
    assert found[Reason.JOINT_STATE_INVALID] == "joint 'j2' jumps"
    assert Reason.JOINT_STATE_INVALID not in world.active
    for _ in range(3):
        world.wait(0.01)
        assert not world.joints(wrong="joint 'j2' jumps")
        assert Reason.JOINT_STATE_INVALID in world.active
    world.wait(0.01)
    assert world.joints()
    assert Reason.JOINT_STATE_INVALID not in world.active
