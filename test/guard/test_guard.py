"""When the guard sends, holds, ends a velocity and stops: from outside, with a clock that the tests advance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from demo_arm import ARM, FINGERS, HOME, configure
from harness import MILLISECOND, Harness, state
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vla_ros.control.command import Command
from vla_ros.control.reasons import Reason
from vla_ros.guard.channel import socket_pair
from vla_ros.guard.frames import DamagedError, GuardFrame, Kind, packet_of
from vla_ros.guard.guard import SOON
from vla_ros.node.guard_client import _HOLDS

LIFETIME = 1.5  # s for which positions, and what a keep-alive is about, remain in force
ENDS = 0.2  # s after which a velocity ends
STEP = 0.01  # rad; far within every limit
NAMES = ARM.joint_names
RATE = {"rate_hz": 10.0}


def position_arm(**limits: Any) -> Harness:
    """A guard of an arm with position output that has measured it at home."""
    robot = {"gripper_joint_names": []}
    guard = Harness(configure(robot=robot, gripper={"mode": "none"}, limits=limits, control=RATE))
    measure(guard, HOME)
    return guard


def velocity_arm(output: str = "joint_velocity", **limits: Any) -> Harness:
    control = RATE | {"output": output}
    sections = {"robot": {"gripper_joint_names": []}, "gripper": {"mode": "none"}, "control": control}
    guard = Harness(configure(**sections, limits=limits, timeouts={"velocity": 2.0}))
    measure(guard, HOME)
    return guard


def measure(guard: Harness, positions: Any) -> int:
    """Let the guard hear a joint state; return its stamp."""
    guard.joints(state(NAMES, positions, guard.now))
    return guard.now


def move(guard: Harness, positions: Any, joints: int, **fields: Any) -> None:
    guard.take(motion(positions, joints), **{"lifetime": round(LIFETIME * 1e9), **fields})


def motion(positions: Any, joints: int, kind: Kind = Kind.POSITIONS) -> GuardFrame:
    values = np.asarray(positions, dtype=np.float64)
    return GuardFrame(kind, values=values, duration=0.1, stamp=1, joints=joints, publisher=b"")


def hold(guard: Harness, positions: Any, joints: int) -> None:
    guard.take(motion(positions, joints)._replace(kind=Kind.HOLD, duration=0.0))


def slow_hold(guard: Harness, seconds: float) -> None:
    guard.take(motion(HOME, guard.now)._replace(kind=Kind.HOLD, duration=seconds))


def drive(guard: Harness, speed: float, **fields: Any) -> None:
    joints = measure(guard, HOME)
    guard.take(motion(np.full(7, speed), joints, Kind.VELOCITIES), **{"lifetime": round(ENDS * 1e9), **fields})


def last(guard: Harness) -> Command:
    return guard.commands[-1]


def test_a_proposed_motion_is_sent_as_it_is() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    [sent] = guard.commands
    assert not sent.hold
    assert sent.names == NAMES
    assert np.array_equal(sent.positions, HOME + STEP)
    assert (sent.stamp, sent.duration) == (1, 0.1)


def test_a_velocity_ends_at_the_end_of_its_frame_and_the_next_one_may_follow() -> None:
    guard = velocity_arm()
    drive(guard, 0.1)
    began = guard.now
    guard.wait(1.0)
    at, ended = guard.sent[-1]
    assert ended.velocities is not None
    assert not any(ended.velocities.values())
    assert ENDS <= (at - began) / 1e9 < ENDS + 0.001
    assert [len(guard.sent), guard.happened("expired"), guard.happened("held")] == [2, 1, 0]
    drive(guard, 0.1)
    assert len(guard.sent) == 3


def test_a_twist_ends_with_a_twist_in_the_same_frame() -> None:
    guard = velocity_arm("twist_stamped")
    guard.take(motion([0.1, 0, 0, 0, 0, 0], 0, Kind.TWIST), lifetime=round(ENDS * 1e9))
    guard.wait(1.0)
    moving, ended = guard.commands
    assert moving.twist is not None
    assert ended.twist is not None
    assert moving.twist[0][0] == 0.1
    assert not np.any(ended.twist)
    assert ended.frame_id == moving.frame_id


def test_an_arm_rests_while_the_node_says_so_and_is_held_once_where_it_is_measured() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    for _ in range(50):
        guard.wait(0.1)
        measure(guard, HOME - 0.05)
        guard.say(Kind.KEEPALIVE, lifetime=round(LIFETIME * 1e9))
    assert len(guard.sent) == 1, "a keep-alive is no reason to send anything"
    began = guard.now
    for _ in range(50):
        guard.wait(0.1)
        measure(guard, HOME - 0.05)
    assert len(guard.sent) == 2
    at, held = guard.sent[-1]
    assert held.hold
    assert np.array_equal(held.positions, HOME - 0.05)
    assert LIFETIME <= (at - began) / 1e9 < LIFETIME + 0.001
    assert guard.happened("lapsed") == 1


def test_an_arm_that_only_sagged_keeps_the_position_at_which_it_was_held() -> None:
    guard = position_arm()
    hold(guard, HOME, guard.now)
    move(guard, HOME + 0.001, guard.now)  # within the 0.02 rad that count as sag
    guard.wait(1.0)
    measure(guard, HOME - 0.015)
    guard.wait(1.0)
    assert last(guard).hold
    assert np.array_equal(last(guard).positions, HOME)


def test_after_a_hold_of_its_own_nothing_moves_until_the_node_has_held() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    guard.wait(1.4)
    joints = measure(guard, HOME)
    guard.wait(0.2)
    count = len(guard.sent)
    assert last(guard).hold
    move(guard, HOME + STEP, joints)
    assert len(guard.sent) == count, "the node does not know yet where the arm is held"
    hold(guard, HOME, joints)
    move(guard, HOME + STEP, joints)
    assert not last(guard).hold
    assert guard.guard.stopped is None


def test_a_lapse_without_a_fresh_joint_state_is_held_when_there_is_one() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    guard.wait(5.0)
    assert len(guard.sent) == 1, "where the arm is now is not known"
    for _ in range(4):  # it is believed once it stays there
        measure(guard, HOME + 0.1)
        guard.wait(0.05)
    assert np.array_equal(last(guard).positions, HOME + 0.1)


@pytest.mark.parametrize("make", [position_arm, velocity_arm])
def test_a_stop_is_in_force_at_once_and_until_a_reset_and_an_arming(make: Any) -> None:
    guard = make()
    go = drive if make is velocity_arm else lambda guard, by, **more: move(guard, HOME + by, guard.now, **more)
    measure(guard, HOME)
    go(guard, STEP)
    began = guard.now
    guard.guard.stop(Reason.OPERATOR_STOP, "true on the stop topic", guard.now)
    guard.guard.look(guard.now)
    guard.wait(0.1)
    at, held = guard.sent[-1]
    assert held.hold
    assert at - began <= (0 if make is velocity_arm else SOON + 1_000_000)
    count = len(guard.sent)
    for armings, allowed in ((1, False), (2, False), (3, True)):
        if allowed:
            guard.say(Kind.RESET, armings=2)
            measure(guard, HOME)
            hold_or_zero = motion(np.zeros(7) if make is velocity_arm else HOME, guard.now)
            guard.take(hold_or_zero._replace(kind=Kind.HOLD))
            count += 1
        measure(guard, HOME)
        go(guard, STEP, armings=armings)
        assert len(guard.sent) == count + allowed
    assert guard.happened("stopped") == guard.happened("reset") == 1


def test_commands_from_before_a_reset_never_move_the_arm() -> None:
    guard = position_arm()
    guard.guard.stop(Reason.OPERATOR_STOP, "", guard.now)
    guard.say(Kind.RESET)
    move(guard, HOME + STEP, guard.now)
    assert not guard.sent
    move(guard, HOME + STEP, guard.now, armings=2)
    assert len(guard.sent) == 1


def test_the_holds_of_the_node_after_its_stop_are_the_only_ones() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    guard.say(Kind.STOP)
    hold(guard, HOME, guard.now)
    guard.wait(3.0)
    assert [command.hold for command in guard.commands] == [False, True]
    assert not guard.happened("held")


def test_a_hold_is_never_behind_a_motion_and_of_several_motions_the_newest_is_sent() -> None:
    guard = position_arm()
    joints = guard.now
    move(guard, HOME, joints)
    guard.take(*(motion(HOME + STEP * share, joints) for share in (0.2, 0.4, 0.6)), lifetime=round(LIFETIME * 1e9))
    assert [float(np.round((each.positions - HOME)[0] / STEP, 3)) for each in guard.commands] == [0.0, 0.6]
    guard.take(
        motion(HOME + STEP, joints),
        motion(HOME, joints)._replace(kind=Kind.HOLD),
        motion(HOME + 2 * STEP, joints + 10**9),  # of a joint state that has not arrived
    )
    assert last(guard).hold


def test_a_hold_that_waited_for_its_joint_state_is_sent_before_the_motion_after_it() -> None:
    guard = position_arm()
    move(guard, HOME, guard.now)
    guard.wait(0.001)
    joints, moved = guard.now, HOME + 0.01
    held = motion(moved, joints + 10**9)._replace(kind=Kind.HOLD)
    guard.take(held, motion(moved + STEP, joints + 10**9), lifetime=round(LIFETIME * 1e9))
    assert len(guard.sent) == 1
    guard.joints(state(NAMES, moved, joints + 10**9))
    assert [command.hold for command in guard.commands] == [False, True, False]


def test_motions_that_are_too_far_apart_to_leave_one_out_are_all_sent() -> None:
    guard = position_arm(max_joint_step=0.05)
    guard.take(*(motion(HOME + by, guard.now) for by in (0.04, 0.08, 0.12)), lifetime=round(LIFETIME * 1e9))
    assert [float(np.round((each.positions - HOME)[0], 3)) for each in guard.commands] == [0.04, 0.08, 0.12]


def test_a_frame_waits_for_the_joint_state_that_it_names() -> None:
    guard = position_arm()
    joints = guard.now + 10_000_000
    guard.wait(0.01)
    move(guard, HOME + STEP, joints)
    assert not guard.sent
    guard.wait(0.003)
    guard.joints(state(NAMES, HOME, joints))
    assert len(guard.sent) == 1


WRONG = {
    "further than limits.max_joint_step": (lambda g: move(g, HOME + 0.5, g.now), "apart, allowed"),
    "not a number": (lambda g: move(g, [*HOME[:6], np.nan], g.now), "finite numbers"),
    "too few numbers": (lambda g: move(g, HOME[:6], g.now), "found 6 numbers, expected 7"),
    "another kind": (lambda g: g.take(motion(HOME, g.now, Kind.VELOCITIES)), "expected POSITIONS"),
    "another arm": (lambda g: move(g, HOME, g.now, arm=1), "unknown: found arm 1"),
    "no duration": (lambda g: move(g, HOME, g.now, duration=0.0), "step of 0.0 s"),
    "longer than a step": (lambda g: move(g, HOME, g.now, duration=0.11), "expected 0 to 0.1 s"),
    "from the future": (lambda g: move(g, HOME, g.now, time=g.now + 300_000_000), "early: made 300.0 ms from now"),
    "damaged": (lambda g: g.guard.take([DamagedError("damaged: the checksum does not fit")], g.now), "damaged"),
    "an old joint state": (lambda g: (g.wait(5.0), move(g, HOME, 1_000_000_000_000)), "s old, allowed"),
    "a hold that never arrives": (lambda g: slow_hold(g, np.inf), "found a hold that takes inf s"),
    "a hold that takes an hour": (lambda g: slow_hold(g, 3600.0), "found a hold that takes 3600.0 s"),
    "options that are none": (
        lambda g: g.guard.take([GuardFrame(Kind.OPTIONS, text="{")], g.now),
        "options: ",
    ),
    "a hold that is far from the arm": (lambda g: hold(g, HOME + 0.6, g.now), "is held"),
}


NAMED = ["damaged", "repeated", "reordered", "unknown"]


@pytest.mark.parametrize("name", NAMED)
def test_a_frame_that_is_none_of_the_nodes_is_rejected_counted_and_named(name: str) -> None:
    guard, (ours, theirs) = position_arm(), socket_pair()
    frame = motion(HOME, guard.now)._replace(arm=int(name == "unknown"), time=guard.now, lifetime=10**9)
    good = packet_of(frame._replace(counter=2))
    packets = {
        "damaged": good[:-1] + b"?",
        "repeated": good,
        "reordered": packet_of(frame._replace(counter=1)),
        "unknown": good,
    }
    for packet in [good, packets[name]] if name != "unknown" else [good]:
        ours.send(packet)
    guard.guard.take(theirs.frames(), guard.now)
    assert guard.guard.counts[f"rejected_{name}"] == 1
    assert guard.guard.stopped is not None
    assert guard.guard.stopped[1].startswith(name)
    for end in (ours, theirs):
        end.close()


@pytest.mark.parametrize("what", list(WRONG))
def test_what_is_wrong_is_rejected_by_name_and_stops_the_arm(what: str) -> None:
    guard = position_arm()
    do, said = WRONG[what]
    do(guard)
    assert guard.guard.stopped is not None
    assert guard.guard.stopped[0] is Reason.GUARD_REJECTED
    assert said in guard.guard.stopped[1]
    assert not guard.sent, "what was rejected is neither sent nor clamped"
    joints = measure(guard, HOME)
    move(guard, HOME + STEP, joints)
    assert not guard.sent


def test_an_arm_outside_of_its_range_may_return_but_not_leave_further() -> None:
    outside = HOME.copy()
    outside[1] = ARM.position_high[1] + 0.05
    for by, passes in ((-STEP, True), (STEP, False)):
        guard = position_arm()
        guard.now += 1_000_000
        joints, goal = measure(guard, outside), outside.copy()
        goal[1] += by
        move(guard, goal, joints)
        assert bool(guard.sent) is passes, guard.guard.stopped


def test_a_lost_heartbeat_stops_a_moving_arm() -> None:
    guard = Harness(
        configure(
            robot={"gripper_joint_names": []}, gripper={"mode": "none"}, timeouts={"heartbeat": 0.5}, control=RATE
        )
    )
    measure(guard, HOME)
    guard.guard.heard = guard.now
    guard.wait(2.0)
    assert guard.guard.stopped is None, "a guard that does nothing needs none"
    guard.guard.heard = guard.now
    joints = measure(guard, HOME)
    move(guard, HOME + STEP, joints)
    guard.wait(0.45)
    measure(guard, HOME)
    guard.guard.heard = guard.now
    guard.wait(0.45)
    assert guard.guard.stopped is None
    measure(guard, HOME)
    guard.wait(0.2)
    assert guard.guard.stopped is not None
    assert guard.guard.stopped[0] is Reason.HEARTBEAT_LOST
    assert last(guard).hold


def test_a_suspended_guard_holds_and_drops_what_waited() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    waited = guard.now + 10_000_000
    guard.now += 400_000_000
    joints = measure(guard, HOME)
    guard.guard.suspended(guard.now)
    assert last(guard).hold
    count = len(guard.sent)
    move(guard, HOME + STEP, joints, time=waited)
    assert (len(guard.sent), guard.guard.stopped) == (count, None)
    hold(guard, HOME, joints)
    move(guard, HOME + STEP, joints)
    assert not last(guard).hold


def test_a_write_that_fails_is_told_and_followed_by_a_hold() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    guard.writes_fail = True
    move(guard, HOME + STEP, guard.now)
    assert guard.happened("unsent") == 2, "the motion, and the hold that follows it"
    guard.writes_fail = False
    move(guard, HOME + STEP, guard.now)
    assert len(guard.sent) == 1, "no motion before a hold"
    hold(guard, HOME, guard.now)
    assert last(guard).hold


RETRY = 5_000_000  # ns; a hold that could not be written is tried again after this


def test_a_first_motion_that_was_written_in_part_is_held() -> None:
    """A gripper's message may fail after the arm's velocity has been published."""
    guard = velocity_arm()
    guard.writes_fail = True
    drive(guard, 0.1, lifetime=10**9)
    guard.writes_fail = False
    guard.wait(0.01)
    assert last(guard).hold


def test_a_reset_of_a_node_that_was_not_stopped_leaves_it_armed() -> None:
    guard = velocity_arm()
    drive(guard, 0.1)
    guard.say(Kind.RESET)
    drive(guard, 0.1)
    assert len(guard.sent) == 2


def test_a_velocity_ends_by_the_guards_own_options_whatever_its_frame_says() -> None:
    guard = velocity_arm()
    drive(guard, 0.1, lifetime=3600 * 10**9)
    guard.wait(2.1)
    assert not any(last(guard).velocities.values())


def test_a_restarted_driver_that_says_zeros_gets_no_hold_at_zeros() -> None:
    """The arm was led 1.2 rad away after a stop."""
    guard = position_arm()
    hold(guard, HOME, measure(guard, HOME))
    move(guard, HOME + STEP, measure(guard, HOME))
    sent = len(guard.sent)
    for _ in range(80):
        guard.wait(0.01)
        guard.joints(state(NAMES, HOME * 0, guard.now), publisher=b"other")
        guard.say(Kind.KEEPALIVE, lifetime=round(LIFETIME * 1e9))
    guard.guard.stop(Reason.OPERATOR_STOP, "", guard.now)
    for _ in range(10):
        guard.wait(0.01)
        guard.joints(state(NAMES, HOME * 0, guard.now), publisher=b"other")
    assert all(np.abs(command.positions - HOME).max() < 0.1 for _, command in guard.sent[sent:])


UNSURE = {
    "late": lambda g: move(g, HOME + STEP, g.now, time=g.now - 300_000_000),
    "a joint state that never came": lambda g: (move(g, HOME + 0.12, g.now + 20_000_000), g.wait(0.25)),
    "of which nothing is known": lambda g: (move(g, HOME, g.now + 10**9), g.wait(0.25)),
}


@pytest.mark.parametrize("what", list(UNSURE))
def test_a_motion_that_may_be_legal_is_dropped_and_held_but_no_reason_to_stop(what: str) -> None:
    """The joint state before a silence may be lost on its way to the guard alone."""
    guard = position_arm(following_error=0.15)
    move(guard, HOME, guard.now)
    UNSURE[what](guard)
    assert guard.happened("dropped") == 1, "the node is told once, and holds"
    assert guard.guard.counts["dropped_late" if what == "late" else "dropped_unknown"] == 1
    measure(guard, HOME)
    guard.wait(0.05)
    assert [command.hold for command in guard.commands] == [False, True]
    assert guard.guard.stopped is None
    move(guard, HOME + STEP, guard.now)
    assert last(guard).hold, "nothing moves before the node has held"
    hold(guard, HOME, guard.now)
    move(guard, HOME + STEP, measure(guard, HOME))
    assert not last(guard).hold


def test_a_joint_state_is_as_old_as_when_the_command_was_made() -> None:
    """A command that waited on its way to the guard, for less than a suspension, proves no fault of the node."""
    guard = position_arm()
    joints = guard.now
    guard.wait(1.1)  # 1 s is allowed: timeouts.joint_state, and a suspension before and after its check
    move(guard, HOME, joints, time=guard.now - 200_000_000)
    assert len(guard.sent) == 1
    move(guard, HOME, joints)
    assert guard.guard.counts["rejected_limits"] == 1


def test_joint_states_that_are_late_by_more_than_half_a_second_do_not_hide_the_newest() -> None:
    """A link that was slow delivers what it kept, between new ones."""
    guard = position_arm()
    for count in range(20):
        guard.wait(0.01)
        joints = measure(guard, HOME)
        guard.joints(state(NAMES, HOME, guard.now - 600_000_000))
        move(guard, HOME + count % 2 * 0.001, joints)
    assert [len(guard.sent), guard.happened("dropped"), guard.guard.stopped] == [20, 0, None]


def test_after_the_clock_was_set_back_stamps_mean_the_newest_joint_states() -> None:
    guard, back = position_arm(following_error=0.15), 5_000_000_000
    for positions in (HOME, HOME + 1.0):  # before the jump, the arm was at HOME
        for count in range(100):
            guard.wait(0.01)
            stamp = 10**12 - back + count * 10_000_000
            guard.joints(state(NAMES, positions, stamp))
    hold(guard, HOME + 1.0, stamp)
    move(guard, HOME + 1.01, stamp)
    assert (len(guard.sent), guard.guard.stopped) == (2, None)
    move(guard, HOME, stamp)
    assert guard.guard.stopped is not None


def test_a_hold_that_is_dropped_is_told_so_that_the_node_holds_again() -> None:
    guard = position_arm()
    move(guard, HOME, guard.now)
    hold(guard, HOME + STEP, guard.now + 10**9)
    guard.wait(0.25)
    assert guard.happened("dropped") == 1
    measure(guard, HOME)
    guard.wait(0.05)
    hold(guard, HOME, guard.now)
    move(guard, HOME + STEP, guard.now)
    assert not last(guard).hold


@pytest.mark.parametrize("output", ["joint_velocity", "twist_stamped"])
def test_a_velocity_that_has_expired_is_not_sent(output: str) -> None:
    guard, kind = velocity_arm(output), Kind.TWIST if output == "twist_stamped" else Kind.VELOCITIES
    numbers = np.full(6 if kind is Kind.TWIST else 7, 0.01)
    guard.take(motion(numbers, guard.now, kind), lifetime=100_000_000, time=guard.now - 100_000_000)
    guard.wait(0.1)
    assert (len(guard.sent), guard.happened("expired"), guard.guard.stopped) == (0, 1, None)


def test_a_velocity_that_has_expired_counts_for_the_acceleration_of_the_next() -> None:
    """It was delayed on its way; the node goes on from its speed."""
    guard = velocity_arm(max_joint_acceleration=0.5)
    for speed in (0.05, 0.1, 0.15, 0.2):  # at most 0.1 rad/s faster than the last
        guard.wait(0.3)
        late = 200_000_000 if 0.05 < speed < 0.2 else 0
        drive(guard, speed, time=guard.now - late, lifetime=100_000_000)
    assert (len(guard.sent), guard.guard.stopped) == (3, None), "two motions, and the end of the first"
    drive(guard, 0.35)
    assert guard.guard.stopped is not None


NAMED = [(0, 0.5, 0.1, 0), (0, 1.1, 0.1, 1), (100, 0.5, 0.1, 1), (100, -1.1, 0.1, 0), (100, 9.0, 0.2, 0)]


@pytest.mark.parametrize(("later", "away", "speed", "sent"), NAMED)
def test_a_velocity_keeps_its_limits_wherever_the_arm_was(later: int, away: float, speed: float, sent: int) -> None:
    """The joint state that it names, 50 ms after the first, may still arrive, or got lost (``later``: ms).

    The joint is as far from where 0.1 rad/s would lead it out of its range as it can move in ``away`` times 50 ms.
    """
    guard = velocity_arm(max_joint_acceleration=0.5)
    limits = guard.guard._arms[0].check.envelope.joints
    where = [limits.high[0] - 0.2 - away * 0.05 * limits.velocity[0], *HOME[1:]]
    named = measure(guard, where) + 50 * MILLISECOND
    if later:
        guard.now += later * MILLISECOND
        measure(guard, where)
    guard.take(motion([speed, *[0] * 6], named, Kind.VELOCITIES), lifetime=10**9)
    assert (len(guard.sent), guard.guard.stopped) == (sent, None)


@pytest.mark.parametrize("output", ["joint_velocity", "twist_stamped"])
@pytest.mark.parametrize("seconds", [1e-6, 0.03, 0.2, 1e9])
def test_the_duration_of_a_velocity_is_not_believed(output: str, seconds: float) -> None:
    """A step's limits divided by a duration of nothing would allow any speed."""
    guard, kind = velocity_arm(output), Kind.TWIST if output == "twist_stamped" else Kind.VELOCITIES
    numbers = np.full(6 if kind is Kind.TWIST else 7, min(100.0, 0.001 / seconds))
    guard.take(motion(numbers, guard.now, kind)._replace(duration=seconds), lifetime=10**9)
    assert guard.guard.stopped is not None
    assert "found a step of" in guard.guard.stopped[1]
    assert not guard.sent


def test_a_person_may_move_the_arm_in_steps_of_their_own() -> None:
    robot = {"gripper_joint_names": []}
    person, limits = {"input": "leader", "leader": "/leader"}, {"max_joint_acceleration": 5.0}
    guard = Harness(configure(robot=robot, gripper={"mode": "none"}, control=RATE, takeover=person, limits=limits))
    measure(guard, HOME)
    for duration in (0.02, 0.1):
        move(guard, HOME, guard.now, duration=duration)
    assert (len(guard.sent), guard.guard.stopped) == (2, None)


def test_a_keep_alive_from_the_future_lasts_no_longer_than_any_other() -> None:
    guard = position_arm()
    move(guard, HOME, guard.now)
    guard.say(Kind.KEEPALIVE, lifetime=2 * 10**9, time=guard.now + 10**15)
    guard.wait(2.0)
    measure(guard, HOME)
    guard.wait(2.0)
    assert guard.happened("lapsed") == 1


def test_the_node_is_told_of_a_lapse_at_once_also_without_a_joint_state() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    guard.wait(5.0)
    assert [guard.happened("lapsed"), guard.happened("held"), len(guard.sent)] == [1, 0, 1]
    assert {"lapsed", "dropped", "suspended", "unsent"} == set(_HOLDS)


def test_after_a_reset_no_hold_is_due_that_the_node_has_forgotten() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    guard.wait(1.4)
    joints = measure(guard, HOME)
    guard.wait(0.2)
    assert last(guard).hold
    guard.say(Kind.RESET)
    move(guard, HOME, joints)
    assert not last(guard).hold


def test_no_gripper_moves_after_a_stop_or_within_a_hold() -> None:
    guard = position_arm()
    move(guard, HOME + STEP, guard.now)
    assert guard.guard.may_move
    guard.say(Kind.STOP)
    assert not guard.guard.may_move, "the node has stopped"
    hold(guard, HOME, guard.now)
    assert not guard.guard.may_move
    move(guard, HOME + STEP, guard.now, armings=2)
    assert guard.guard.may_move
    guard.wait(1.6)
    assert not guard.guard.may_move, "what moved has lapsed"


@pytest.mark.parametrize(
    ("at", "measured", "passes"),
    [(0.02, None, True), (0.0401, None, False), (0.043, 0.042, True), (0.06, 0.042, False), (-1.0, 0.0, False)],
)
def test_the_fingers_of_a_hold_are_in_their_range_or_where_they_are_measured(at, measured, passes) -> None:
    guard = Harness(configure(control=RATE))
    fingers = [] if measured is None else [measured] * 2
    names = NAMES if measured is None else (*NAMES, *FINGERS)
    guard.joints(state(names, [*HOME, *fingers], guard.now))
    guard.take(motion([*HOME, at, at], guard.now)._replace(kind=Kind.HOLD, duration=0.0))
    assert (len(guard.sent), guard.guard.stopped is None) == (passes, passes)


def test_a_heartbeat_that_is_lost_after_a_stop_does_not_keep_the_processor_busy() -> None:
    options = {"robot": {"gripper_joint_names": []}, "gripper": {"mode": "none"}, "control": RATE}
    guard = Harness(configure(**options, timeouts={"heartbeat": 1.0}))
    guard.guard.heard = guard.now
    move(guard, HOME + STEP, measure(guard, HOME))
    guard.wait(2.0)  # stopped by the heartbeat; without a joint state the hold is due
    due = guard.guard.due(guard.now)
    assert guard.guard.stopped is not None
    assert due is not None
    assert due > guard.now


class Node(RuleBasedStateMachine):
    """Anything that a node may do, and what the guard must make of it, as a model of a few lines."""

    def __init__(self) -> None:
        super().__init__()
        self.guard, self.armings, self.least = velocity_arm(), 1, 0
        self.stopped = self.needs_hold = False
        self.ends: int | None = None  # of the velocity in force

    def expire(self) -> None:
        if self.ends is not None and self.guard.now >= self.ends:
            self.ends = None

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.1999, 0.2, 0.5]))
    def time_passes(self, seconds: float) -> None:
        self.guard.wait(seconds)
        self.expire()

    @rule(speed=st.floats(-0.3, 0.3), lifetime=st.sampled_from([0.05, 0.2, 1.0]))
    def moves(self, speed: float, lifetime: float) -> None:
        before = len(self.guard.sent)
        drive(self.guard, speed, lifetime=round(lifetime * 1e9), armings=self.armings)
        allowed = not self.stopped and self.armings >= self.least and not self.needs_hold
        assert len(self.guard.sent) == before + allowed
        if allowed:
            self.ends = self.guard.now + round(lifetime * 1e9)
            assert last(self.guard).velocities == dict.fromkeys(NAMES, speed)

    @rule()
    def holds(self) -> None:
        hold(self.guard, np.zeros(7), 0)
        self.ends, self.needs_hold = None, False
        assert last(self.guard).hold

    @rule(of_node=st.booleans())
    def stops(self, of_node: bool) -> None:
        if of_node:
            self.guard.say(Kind.STOP, armings=self.armings)
        else:
            self.guard.guard.stop(Reason.OPERATOR_STOP, "", self.guard.now)
            self.guard.guard.look(self.guard.now)
            self.stopped = True
        self.ended()

    @rule()
    def sends_what_is_wrong(self) -> None:
        drive(self.guard, 1e6, armings=self.armings)
        if not self.stopped and self.armings >= self.least and not self.needs_hold:
            self.stopped = True
            self.ended()

    def ended(self) -> None:
        self.needs_hold |= self.ends is not None
        self.ends, self.least = None, max(self.least, self.armings + 1)

    @precondition(lambda self: self.stopped)
    @rule()
    def resets(self) -> None:
        self.guard.say(Kind.RESET, armings=self.armings)
        self.stopped = self.needs_hold = False
        self.least = self.armings + 1

    @rule()
    def arms(self) -> None:
        self.armings += 1

    @rule()
    def writes_fail_once(self) -> None:
        if self.ends is not None and not self.needs_hold and self.armings >= self.least:
            self.guard.writes_fail = True
            drive(self.guard, 0.01, armings=self.armings, lifetime=10**9)
            self.guard.writes_fail, self.needs_hold = False, True
            self.ends = self.guard.now + RETRY  # of what was in force, or of what may have been written in part

    @invariant()
    def what_is_in_force_at_the_driver_is_what_the_model_says(self) -> None:
        moving = bool(self.guard.sent) and not last(self.guard).hold
        assert moving is (self.ends is not None)
        assert (self.guard.guard.stopped is not None) is self.stopped


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
