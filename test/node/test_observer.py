from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from vla_ros.config import build
from vla_ros.contract.binding import bind, make_arms
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.control.inputs import Snapshot
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError
from vla_ros.node import observer as module
from vla_ros.node.observer import History, Observer, Past
from vla_ros.types import JointState, Observation
from vla_ros.vision.messages import encode_image

BEGIN, PERIOD = 1_700_000_000_000_000_000, 33_333_333  # a camera at 30 Hz
# At 10 steps a second: 0.4, 0.2, 0.1 and 0 s ago.
TIMES = (DeltaTimestamp(-4), DeltaTimestamp(seconds=-0.2), DeltaTimestamp(-1), DeltaTimestamp())
STATE = StateFeature("q", parse_components("arm.joint_position(joint_1)"), delta_timestamps=TIMES)


def observer(spec: PolicySpec, **values: Any) -> Observer:
    config = build({"robot.urdf": "demo", "control.rate_hz": 10.0, **values})
    return Observer(bind(spec, config, make_arms(config)))


def frame(number: int) -> bytes:
    return encode_image(np.full((6, 8, 3), number, np.uint8), stamp(number), "camera")


def stamp(number: int) -> int:
    return BEGIN + number * PERIOD


def inputs(number: int) -> Snapshot:
    names = tuple(f"joint_{joint}" for joint in range(1, 8))
    return Snapshot(JointState(names, np.full(7, 0.01 * number), stamp(number)), instruction="go")


def came(made: Observer, numbers: range) -> None:
    for number in numbers:
        made.remember(0, stamp(number), frame(number), inputs(number))


def ask(made: Observer, number: int) -> Observation:
    return made.observe([frame(number)], inputs(number))


def levels(observation: Observation) -> list[int]:
    images = observation.images["image"]
    assert images.shape == (len(TIMES), 6, 8, 3)
    assert images.dtype == np.uint8
    return [int(image[0, 0, 0]) for image in images]


def test_images_and_states_belong_to_their_times_at_any_inference_rate() -> None:
    made = observer(PolicySpec((ImageFeature("image", delta_timestamps=TIMES),), (STATE,)))
    came(made, range(50))
    found = ask(made, 49)
    assert levels(found) == [37, 43, 46, 49]
    assert found.state["q"].shape == (4, 1)
    np.testing.assert_allclose(found.state["q"][:, 0], [0.37, 0.43, 0.46, 0.49])
    assert not found.raw_images, "a policy cannot take past images as the camera sent them"


def test_the_first_is_repeated_at_the_start_of_an_episode() -> None:
    made = observer(PolicySpec((ImageFeature("image", delta_timestamps=TIMES),), (STATE,)))
    assert levels(ask(made, 0)) == [0, 0, 0, 0]
    came(made, range(1, 8))
    assert levels(ask(made, 7)) == [0, 1, 4, 7]
    made.begin_task()
    came(made, range(8, 10))
    found = ask(made, 9)
    assert levels(found) == [8, 8, 8, 9]
    np.testing.assert_allclose(found.state["q"][:, 0], [0.08, 0.08, 0.08, 0.09])


def test_frames_newer_than_the_observed_one_are_not_used() -> None:
    made = observer(PolicySpec((ImageFeature("image", delta_timestamps=TIMES),)))
    came(made, range(20))
    assert levels(ask(made, 15)) == [3, 9, 12, 15]


def test_without_a_receiver_observed_frames_form_the_history() -> None:
    """As in a replay."""
    made = observer(PolicySpec((ImageFeature("image", delta_timestamps=TIMES),)))
    found = [levels(ask(made, number)) for number in range(0, 50, 3)]
    assert found[-1] == [36, 42, 45, 48]


def test_a_state_alone_looks_back_without_holding_images() -> None:
    made = observer(PolicySpec(state=(STATE,)))
    assert made.remembers
    came(made, range(30))
    np.testing.assert_allclose(ask(made, 29).state["q"][:, 0], [0.17, 0.23, 0.26, 0.29])
    assert all(past.data is None for past in made._history._frames[0])
    assert set(ask(made, 29).raw_images) == {"image"}


def test_no_frame_is_kept_without_past_images() -> None:
    made = observer(PolicySpec())
    assert not made.remembers
    made.remember(0, stamp(1), frame(1), inputs(1))
    assert not made._history._frames


def test_each_image_is_processed_once(monkeypatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(module, "process", lambda raw: (done.append(raw.stamp), raw.pixels)[1])
    made = observer(PolicySpec((ImageFeature("image", delta_timestamps=TIMES),)))
    for number in range(0, 60, 3):
        levels(ask(made, number))
    assert sorted(set(done)) == done


def test_the_ring_is_as_long_as_the_oldest_timestamp() -> None:
    ring, kept, held = History({0: 1.0}), WeakSet[Past](), []

    def add(number: int) -> None:
        past = Past(stamp(number), b"", Snapshot())
        kept.add(past)
        ring.add(0, past)

    for number in range(1000):
        add(number)
        add(number)  # a stamp that comes twice
        held.append(len(kept))
    assert max(held) <= 1.25 * 30 + 2
    add(0)
    assert len(kept) == 1, "the clock jumped back"


def test_an_optional_camera_may_be_missing() -> None:
    two = {"camera.topics": ["/a", "/b"], "camera.keys": ["image", "low"]}
    made = observer(PolicySpec((ImageFeature("low", required=False), ImageFeature("image"))), **two)
    assert set(made.observe([frame(1), None], inputs(1)).images) == {"image"}
    assert set(made.observe([frame(1), frame(1)], inputs(1)).images) == {"low", "image"}
    with pytest.raises(Refused, match="no frame yet on /a") as refused:
        made.observe([None, frame(1)], inputs(1))
    assert refused.value.reason is Reason.INPUT_MISSING


def test_delta_indices_need_a_rate() -> None:
    spec = PolicySpec((ImageFeature("image", delta_timestamps=TIMES),))
    with pytest.raises(ConfigError, match=r"control\.rate_hz: found 0, but 'image' has past values in steps"):
        observer(spec, **{"control.rate_hz": 0.0})
