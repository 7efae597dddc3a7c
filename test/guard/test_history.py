"""Joint states that are late, and clocks that are set back, as the guard's own history knows them."""

import numpy as np
import pytest

from vla_ros.guard.history import JointHistory
from vla_ros.types import JointState

MS = 1_000_000
SECOND = 1000 * MS
DRIVER = b"driver".ljust(16, b"\0")
BEGAN = 1_000 * SECOND  # of the ROS clock, when the monotonic one was 0


def joints(stamp: int, position: float) -> JointState:
    return JointState(("a",), np.array([position]), stamp)


@pytest.mark.parametrize("waited", [60, 200, 400])
def test_late_joint_states_between_others_void_none_that_a_frame_may_name(waited: int) -> None:
    """Those from 0.6 s ago arrive while new ones do not: the newest remains known for as long as it may be used."""
    history = JointHistory(("a",))
    for now in range(0, 1000, 20):
        history.add(joints(BEGAN + now * MS, 1.0), DRIVER, now * MS, stamped=True)
    for now in range(1000, 980 + waited, 20):
        history.add(joints(BEGAN + (now - 600) * MS, 0.0), DRIVER, now * MS, stamped=True)
    found = history.find(BEGAN + 980 * MS, DRIVER)
    assert found is not None
    assert found.exact
    assert found.low == found.high == 1.0


@pytest.mark.parametrize("back", [600, 5000])
def test_a_stamp_that_comes_again_after_the_clock_was_set_back_is_the_newer_one(back: int) -> None:
    """Until it has arrived, no joint state of that stamp is known, whatever another clock did before."""
    history = JointHistory(("a",))
    for now, stamp in ((100, 1000), (200, 200)):
        history.add(joints(BEGAN + stamp * MS, 1.0), b"ended", now * MS, stamped=True)
    for now in range(0, 6000, 20):
        history.add(joints(BEGAN + now * MS, 1.0), DRIVER, now * MS, stamped=True)
    for now in range(6000, 8000, 20):
        stamp = BEGAN + (now - back) * MS
        if now > 6000:
            before = history.find(stamp, DRIVER)
            assert before is None, f"{now} ms"
        history.add(joints(stamp, 0.0), DRIVER, now * MS, stamped=True)
        found = history.find(stamp, DRIVER)
        assert found is not None
        assert found.low == 0.0
