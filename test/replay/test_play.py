"""A bag goes through the very step of the live node, in open loop and as it would have run.

Pins: wrong pairing of frames and actions, memory of past episodes, frames answered twice, a busy policy that makes
the queue grow, resuming that counts frames twice or not at all, images that differ from the live ones.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.control.inputs import Snapshot
from vla_ros.kinematics.solver import Kinematics
from vla_ros.node.pipeline import build_pipeline
from vla_ros.policies import Policy
from vla_ros.policies.hold import HoldPolicy
from vla_ros.types import ActionChunk
from vla_ros_lab.replay import samples
from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.evaluate import BagJob
from vla_ros_lab.replay.play import ReplayOptions
from vla_ros_lab.replay.report import WorstFrame, images_of
from vla_ros_lab.replay.result import make_result
from vla_ros_lab.replay.series import Table, TopicSeries
from vla_ros_lab.replay.storage import BagError

FAST = 0.01  # a machine on which nothing takes long, however busy the one that runs the tests is


def summary(outcome, config, options=None):
    result = make_result([outcome], config, options or ReplayOptions())
    return result.figures, result.verdict


def test_the_joint_state_nearest_to_a_stamp_may_have_come_late():
    """It was searched for as if stamps came in order."""
    times, stamps = np.arange(5), np.array([10, 50, 20, 30, 40])
    found = TopicSeries((Table(("joint_1",), times, stamps, stamps[:, None].astype(float)),))
    assert [found.nearest_stamp(49, now, 5).stamp for now in range(1, 5)] == [50] * 4
    assert found.nearest_stamp(49, 0, 5) is None
    assert found.nearest_stamp(26, 4, 5).stamp == 30


def test_another_checkpoint_at_the_same_path_resumes_no_partial_results(tmp_path):
    (tmp_path / "bag").touch()
    weights = tmp_path / "model" / "lora_adapter" / "adapter_model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"old")
    config = build({"policy.name": "openvla", "policy.checkpoint": str(tmp_path / "model")})
    job = BagJob(tmp_path / "bag", config, ReplayOptions(), tmp_path / "partial")
    before = job.partial_file()
    assert job.partial_file() == before
    os.utime(weights, ns=(1, 1))
    assert job.partial_file() != before


def test_a_policy_that_knows_the_answer_is_good(play, write_bag, recording, brightness_policy, replay_config):
    outcome = play(write_bag("bag", recording), brightness_policy())
    patient = build({"control.rate_hz": 1.0}, replay_config)  # a busy machine may need longer than the 100 ms
    found, judgement = summary(outcome, patient)
    assert found["frames"] == {
        "received": 40,
        "used": 40,
        "compared": 40,
        "skipped": 0,
        "dropped": {},
        "images_prepared": 40,
        "every": 1,
    }
    assert found["mae"] == pytest.approx(0, abs=1e-12)
    assert found["direction_cosine"] == pytest.approx(1)
    assert found["gripper_f1"] == 1
    assert found["intervals"]["direction_cosine"] == pytest.approx([1, 1])
    assert found["gripper"]["events"]["matched"] == 2
    assert judgement.level == "good", judgement.reasons
    assert found["baselines"]["mean_action"]["mae"] > 0.01
    assert [episode["instruction"] for episode in found["episodes"]] == [
        "pick up the red cube",
        "pick up the blue ball",
    ]


def test_every_frame_is_answered_once_with_its_own_inputs(play, write_bag, recording, brightness_policy):
    policy = brightness_policy()
    policy.spec = replace(policy.spec, state=(StateFeature("joints", parse_components("arm.joint_position")),))
    joints = [message for _, topic, message in recording if topic == "/joint_states" and "joint_7" in message.name]
    for step, message in enumerate(joints):
        message.position[2] = 0.01 * step
    play(write_bag("bag", recording), policy)
    stamps = [stamp for stamp, _, _ in policy.asked]
    assert stamps == sorted(set(stamps))
    assert {words for _, words, _ in policy.asked[:20]} == {"pick up the red cube"}
    assert {words for _, words, _ in policy.asked[20:]} == {"pick up the blue ball"}
    assert [state["joints"][6] for _, _, state in policy.asked] == [0.01 * step for step in range(40)]


def test_every_and_limit(play, write_bag, recording, brightness_policy):
    path = write_bag("bag", recording)
    found = play(path, brightness_policy(), ReplayOptions(every=3)).samples
    assert (len(found.times), found.received, found.skipped) == (14, 40, 26)
    found = play(path, brightness_policy(), ReplayOptions(limit=5)).samples
    assert (len(found.times), found.received, found.complete) == (5, 5, True)


def test_a_given_instruction_replaces_the_recorded_one(play, write_bag, recording, brightness_policy):
    policy = brightness_policy()
    play(write_bag("bag", recording), policy, ReplayOptions(instruction="wave"))
    assert {words for _, words, _ in policy.asked} == {"wave"}


def test_a_pause_starts_an_episode(play, write_bag, recording, brightness_policy):
    late = [(time + (5_000_000_000 if index >= 30 else 0), *rest) for index, (time, *rest) in enumerate(recording)]
    late = [item for item in late if item[1] != "/vla_policy/instruction"]
    found = play(write_bag("bag", late), brightness_policy(), ReplayOptions(instruction="x")).samples
    assert len(found.instructions) == 2


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_as_it_would_have_run_skips_frames_while_the_policy_is_busy(
    play, write_bag, recording, brightness_policy, speed
):
    config = build({"robot.urdf": "demo", "robot.tip_frame": "tool", "control.rate_hz": 0.0})
    policy = brightness_policy(seconds=0.16)
    outcome = play(write_bag("bag", recording), policy, ReplayOptions(speed=speed), config=config)
    found = outcome.samples
    # Frames come every 100 ms of the recording; an answer takes a bit over 160 ms times the speed.
    # Before the first and after the last one there is no part of such a time.
    expected = 40 * 0.1 / (0.16 * speed)
    assert 0.6 * expected < len(found.times) <= expected + 2
    assert found.received == 40
    # What is inferred when the instruction changes is void, as in the live node.
    assert found.skipped + len(found.times) + found.dropped.total() == 40
    assert found.dropped.total() <= 1
    assert (np.diff(found.times) > 0).all()
    ages = found.age_ms[np.isfinite(found.age_ms)]  # the last command may be refused: no joint states follow
    assert len(ages) >= len(found.times) - 2
    assert (ages >= 160).all()
    assert np.median(ages) < 160 + 100 / speed + 60
    found, _ = summary(outcome, config, ReplayOptions(speed=speed))
    assert found["mode"] == "as_it_would_have_run"
    assert found["frame_age_ms"]["count"] == len(ages)
    assert found["deadline"]["missed"] > 0


def test_a_fast_policy_misses_nothing_as_it_would_have_run(
    play, write_bag, recording, brightness_policy, replay_config
):
    outcome = play(write_bag("bag", recording), brightness_policy(), ReplayOptions(speed=FAST))
    assert len(outcome.samples.times) >= 38  # the rate limit of 10 Hz may pass a frame on to the next tick
    assert summary(outcome, replay_config)[0]["direction_cosine"] == pytest.approx(1)


@pytest.mark.parametrize(("schedule", "asked"), [("sync", 10), ("append", 14)])
def test_a_chunk_is_executed_before_the_policy_is_asked_again(
    play, write_bag, recording, brightness_policy, replay_config, schedule, asked
):
    policy, config = brightness_policy(horizon=4), build({"control.schedule": schedule}, replay_config)
    found = play(write_bag("bag", recording), policy, ReplayOptions(speed=FAST), config=config).samples
    # What is inferred while the instruction changes is dropped, and inferred again.
    assert asked - 1 <= len(policy.asked) <= asked + 2
    assert found.skipped == 40 - len(policy.asked)


@pytest.mark.parametrize("schedule", ["auto", "append", "ensemble"])
def test_in_open_loop_only_the_first_action_of_each_chunk_is_compared(
    play, write_bag, recording, brightness_policy, replay_config, schedule
):
    """Not what a schedule makes of it and the chunks before, which began at other frames."""
    config = build({"control.schedule": schedule}, replay_config)
    path = write_bag("bag", recording)
    one, chunks = (play(path, brightness_policy(horizon=size), config=config).samples for size in (1, 4))
    np.testing.assert_array_equal(chunks.predicted, one.predicted)


def test_bad_frames_are_counted_and_the_next_one_works(play, write_bag, recording, brightness_policy):
    for index in (4, 7):
        image = next(item[2] for item in recording[4 * index :] if item[1] == "/camera/image_raw")
        image.encoding = "16UC1"
    found = play(write_bag("bag", recording), brightness_policy()).samples
    assert sum(found.dropped.values()) == 2
    assert all("16UC1" in reason for reason in found.dropped)
    assert len(found.times) == 38


def test_a_missing_instruction_drops_every_frame_and_is_in_the_verdict(
    play, write_bag, recording, brightness_policy, replay_config
):
    silent = [item for item in recording if item[1] != "/vla_policy/instruction"]
    outcome = play(write_bag("bag", silent), brightness_policy())
    found, judgement = summary(outcome, replay_config)
    (reason,) = found["frames"]["dropped"]
    assert reason.startswith("no_instruction: set policy.instruction")
    assert found["frames"]["dropped"][reason] == 40
    assert any("--instruction" in line for line in judgement.reasons)
    assert judgement.level == "bad"
    assert any("no_instruction" in reason for reason in judgement.reasons)


def test_without_a_urdf_actions_are_compared_all_the_same(play, write_bag, recording, brightness_policy):
    config = build({})
    outcome = play(write_bag("bag", recording), brightness_policy(), config=config)
    assert "robot.urdf is not set" in outcome.note
    assert summary(outcome, config)[0]["direction_cosine"] == pytest.approx(1)


class Interrupting:
    """Passes on to a policy until somebody presses Ctrl-C."""

    def __init__(self, policy, after):
        self._policy, self._left = policy, after

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def infer(self, session, observation):
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._policy.infer(session, observation)


def test_an_interrupted_run_resumes_where_it_stopped(play, write_bag, recording, brightness_policy, tmp_path):
    path = write_bag("bag", recording)
    whole = play(path, brightness_policy()).samples
    first = play(path, Interrupting(brightness_policy(), 27), partial=tmp_path / "partial").samples
    assert not first.complete
    assert len(first.times) == 27
    second = brightness_policy()
    joined = play(path, second, partial=tmp_path / "partial").samples
    assert len(second.asked) == 13
    assert joined.complete
    for name in ("times", "predicted", "recorded", "episodes"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name), equal_nan=True), name
    for name in ("instructions", "rule", "dropped", "losses", "topics", "images"):
        assert getattr(joined, name) == getattr(whole, name), name
    assert joined.commands.keys() == whole.commands.keys()
    assert all(np.array_equal(joined.commands[key], whole.commands[key], equal_nan=True) for key in whole.commands)
    assert (first.received, joined.received) == (27, 40)
    (file,) = (tmp_path / "partial").iterdir()
    third = brightness_policy()
    again = play(path, third, partial=tmp_path / "partial").samples
    assert third.asked == []
    assert np.array_equal(again.predicted, whole.predicted)
    file.write_bytes(b"PK nonsense")
    with pytest.raises(BagError, match="delete the file to start again"):
        samples.load_samples(file)


def test_the_images_of_single_moments_are_the_live_ones(
    play, write_bag, recording, replay_config, brightness_policy
):
    path, policy = write_bag("bag", recording), brightness_policy()
    result = make_result([play(path, policy)], replay_config, ReplayOptions())
    found = images_of(result, [WorstFrame(0, row, 1.0) for row in (3, 30)])
    with Bag(path) as bag:
        frames = list(bag.records(["/camera/image_raw"]))
        observer = build_pipeline(replay_config, policy.spec).observer
        for row in (3, 30):
            live = observer.observe([bytes(frames[row].data)], Snapshot(instruction="x"))
            assert (found[0, row]["image"] == live.images["image"]).all()


def test_no_image_is_resized_for_a_policy_that_uses_none(play, write_bag, recording, replay_config):
    found = play(write_bag("bag", recording), HoldPolicy(replay_config)).samples
    assert found.images == 0
    assert len(found.times) == 40


def test_two_cameras_give_their_newest_images(play, write_bag, make):
    class Both(Policy):
        spec = PolicySpec((ImageFeature("image"), ImageFeature("wrist")))

        def __init__(self):
            self.levels = []

        def infer(self, session, observation):
            self.levels.append(tuple(round(float(observation.images[key].mean())) for key in self.spec.image_keys))
            return ActionChunk(np.zeros((1, 7)), observation.stamp)

    config = build({"camera.topics": ["/front", "/hand"], "camera.keys": ["image", "wrist"]})
    messages = []
    for step in range(6):
        stamp = make.start + step * 100_000_000
        for topic, level, late in (("/hand", 100 + step, 0), ("/front", step, 10_000_000)):
            if topic == "/front" or step % 2 == 0:  # the second camera is slower
                messages.append((stamp + late, topic, make.image(stamp, np.full((30, 40, 3), level, np.uint8))))
    policy = Both()
    outcome = play(write_bag("bag", messages), policy, ReplayOptions(instruction="x"), config=config)
    assert policy.levels == [(0, 100), (1, 100), (2, 102), (3, 102), (4, 104), (5, 104)]
    assert outcome.samples.received == 6


@pytest.mark.parametrize("wrong", [0, 7_000_000_000, 4 * 10**18 // 2])
def test_wrong_stamps_do_not_matter_to_the_comparison(
    play, write_bag, recording, brightness_policy, replay_config, make, wrong
):
    """Clocks that stand still, start at zero, or run in another year: the recorder's time decides."""
    changed = []
    for index, (time, topic, message) in enumerate(recording):
        if topic == "/camera/image_raw":
            pixels = message.data.reshape(48, 64, 3)
            message = make.image(wrong + (index if wrong else 0), pixels)
        changed.append((time, topic, message))
    found, judgement = summary(play(write_bag("bag", changed), brightness_policy()), replay_config)
    assert found["direction_cosine"] == pytest.approx(1)
    assert found["frames"]["compared"] == 40
    assert judgement.level == "warn"
    assert any("stamp" in reason for reason in judgement.reasons)  # the live node would not believe them


@pytest.mark.parametrize(
    ("wall", "what", "since"),
    [
        ("side = box 0.3 0.05 0.6 at 0.5 0.3 0.2", "the recorded motion", 1.2),
        ("front = box 0.2 2 2 at {x} 0 1", "the policy's command", 0.0),
    ],
)
def test_the_verdict_says_where_the_collision_check_would_have_held_the_arm(
    wall, what, since, play, write_bag, make, small_recording, brightness_policy, replay_config, tmp_path
):
    """The policy moves along x; in the second half of the recording, the first joint turns by half a radian."""
    home = [0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0]
    turned = [
        (at, topic, make.joints(at, [max(0.0, 0.5 * ((at - make.start) / 1e9 - 1.0)), *home[1:]]))
        for at, topic, message in small_recording
        if topic == "/joint_states" and len(message.position) == 4
    ]
    messages = [each for each in small_recording if each[1] != "/joint_states"] + turned
    x = Kinematics.from_urdf("demo").forward(np.array(home)).position[0] + 0.16
    check = {"check": True, "deceleration": 20.0, "obstacles": [wall.format(x=x)]}
    config = build({f"collision.{name}": value for name, value in check.items()}, replay_config)
    path = write_bag("bag", sorted(messages, key=lambda each: each[0]))
    outcome = play(path, brightness_policy(), config=config, partial=tmp_path / "partial")
    found, judgement = summary(outcome, config)
    first = next(stop for stop in found["bags"][0]["stops"] if stop["why"].startswith(what))
    assert since <= first["seconds"] < since + 0.8
    name = wall.partition(" ")[0]
    assert any(
        "the arm would be held" in reason and f"{what}: " in reason and name in reason
        for reason in judgement.reasons
    )
    assert (
        play(path, brightness_policy(), config=config, partial=tmp_path / "partial").samples.stops
        == outcome.samples.stops
    )
    without = play(path, brightness_policy())
    assert not without.samples.stops


def at_coarse_times(recording, tick=500_000_000):
    """The messages in their order, received at the ticks of a slow clock."""
    return [(time // tick * tick, topic, message) for time, topic, message in recording]


def test_a_run_is_resumed_between_frames_of_one_time(play, write_bag, recording, brightness_policy, tmp_path):
    path = write_bag("bag", at_coarse_times(recording))
    whole = play(path, brightness_policy()).samples
    first = play(path, Interrupting(brightness_policy(), 13), partial=tmp_path / "partial").samples
    assert first.times[-1] == whole.times[13], "the run stops between frames of one receive time"
    joined = play(path, brightness_policy(), partial=tmp_path / "partial").samples
    assert np.array_equal(joined.stamps, whole.stamps)
    assert np.array_equal(joined.predicted, whole.predicted)
    assert joined.received == whole.received == 40


def test_every_and_limit_go_on_where_the_run_stopped(play, write_bag, recording, brightness_policy, tmp_path):
    path, options = write_bag("bag", recording), ReplayOptions(every=3, limit=9)
    whole = play(path, brightness_policy(), options).samples
    play(path, Interrupting(brightness_policy(), 4), options, partial=tmp_path / "partial")
    joined = play(path, brightness_policy(), options, partial=tmp_path / "partial").samples
    assert np.array_equal(joined.stamps, whole.stamps)
    assert len(joined.stamps) == 9


def test_a_frame_is_read_again_by_its_stamp(play, write_bag, recording, brightness_policy, replay_config):
    """The report's images and the trials read frames again; several have one receive time."""
    outcome = play(write_bag("bag", at_coarse_times(recording)), brightness_policy())
    result = make_result([outcome], replay_config, ReplayOptions())
    moments = [WorstFrame(0, row, 0.0) for row in range(20)]
    images = images_of(result, moments)
    levels = [round(float(images[0, row]["image"].mean()) / 5) for row in range(20)]
    assert levels == list(range(20))


def test_a_coarse_clock_is_remarked_and_a_constant_one_refused(play, write_bag, recording, brightness_policy):
    outcome = play(write_bag("coarse", at_coarse_times(recording)), brightness_policy())
    assert "32 of 40 frames have the receive time of another one" in outcome.note
    assert play(write_bag("bag", recording), brightness_policy()).note == ""
    outcome = play(write_bag("zero", [(0, topic, message) for _, topic, message in recording]), brightness_policy())
    assert outcome.samples is None
    assert "joint states have the receive time 0 ns" in outcome.problem
    assert "--clock stamp" in outcome.problem


def test_another_instruction_than_the_recorded_one_is_remarked(
    play, write_bag, recording, brightness_policy, replay_config
):
    config = build({"policy.instruction": "fold the towel"}, replay_config)
    path = write_bag("bag", recording)
    outcome = play(path, brightness_policy(), config=config)
    assert (
        "policy.instruction is 'fold the towel', but 'pick up the blue ball', 'pick up the red cube' was"
        in outcome.note
    )
    assert set(outcome.samples.instructions) == {"pick up the blue ball", "pick up the red cube"}
    given = play(path, brightness_policy(), ReplayOptions(instruction="fold the towel"), config=config)
    assert given.note == ""
