"""Frames wait in memory of the policy's device: newest wins, a slot in use is never written, nothing waits."""

import gc

import numpy as np
import pytest

from vla_ros.config import load
from vla_ros.execution.frame_slots import FrameSlots, slots_of
from vla_ros.vision.decode import decode_image
from vla_ros.vision.messages import encode_image

SIZE = (48, 64)


def message(value, encoding="rgb8", size=SIZE):
    return encode_image(np.full((*size, 3), value, np.uint8), value, "camera", encoding)


@pytest.fixture
def made():
    return []


@pytest.fixture
def slots(made):
    def page_locked(size):
        made.append(np.zeros(size, np.uint8))
        return made[-1]

    options = ["camera.topics:=[/a, /b]", "camera.keys:=[a, b]", "camera.width:=64", "camera.height:=48"]
    return slots_of(load([], options).camera, page_locked)


def inside(image, made):
    return any(np.shares_memory(image, memory) for memory in made)


def test_a_frame_is_copied_once_and_its_pixels_are_those_of_the_slot(slots, made):
    data = message(7)
    kept = slots[0].keep(data)
    image = decode_image(kept).image
    assert bytes(kept) == data
    assert inside(image, made)
    assert image.flags.writeable
    assert image.flags.c_contiguous
    assert (image == 7).all()


def test_a_slot_is_written_again_only_when_nothing_refers_to_its_frame(slots, made):
    kept = [slots[0].keep(message(value)) for value in range(4)]
    images = [decode_image(each).image for each in kept]
    data = message(9)
    assert slots[0].keep(data) is data  # none is free: as without slots
    assert inside(decode_image(slots[1].keep(data)).image, made)  # each camera has its own
    del kept[2]
    assert slots[0].keep(data) is data  # its image is still in use
    del images[2]
    gc.collect()
    again = decode_image(slots[0].keep(data)).image
    assert inside(again, made)
    assert [int(each[0, 0, 0]) for each in images] == [0, 1, 3]


def test_a_thousand_frames_of_which_the_newest_waits_need_four_slots(slots, made):
    waiting = used = None
    for value in range(1000):
        waiting = slots[0].keep(message(value % 256))
        if value % 3 == 0:
            used = decode_image(waiting).image
        assert isinstance(waiting, memoryview)
        assert inside(used, made)
    assert len(made) == 8


@pytest.mark.parametrize("data", [message(1, "bgr8"), message(1, size=(49, 80))], ids=["decoded", "larger"])
def test_other_frames_stay_where_they_are(slots, data):
    assert slots[0].keep(data) is data


@pytest.mark.parametrize("options", [["camera.transport:=compressed"], []], ids=["compressed", "no such memory"])
def test_there_may_be_no_slots(options):
    memory = (lambda size: np.zeros(size, np.uint8)) if options else (lambda size: None)
    data = message(1)
    [slots] = slots_of(load([], options).camera, memory)
    assert slots.keep(data) is data
    assert FrameSlots([]).keep(data) is data
