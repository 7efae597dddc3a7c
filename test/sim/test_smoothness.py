"""Stalls and seams of the commands that the robot's side receives."""

import numpy as np
import pytest

from vla_ros.sim.smoothness import Commands, longest_gap, seam_ratio, stalled_share

RATE = 20.0


def commands(jump: float = 0.0, pause: float = 0.0) -> Commands:
    """Four chunks of 10 steps of a slow wave; each chunk begins with a ``jump`` and after a ``pause``."""
    steps = np.arange(40)
    times = steps / RATE + pause * (steps // 10)
    positions = 0.1 * np.sin(0.3 * steps)[:, None] + jump * (steps // 10)[:, None]
    return Commands(np.append(times, times[-1] + 1 / RATE), steps // 10, np.repeat(positions, 7, axis=1))


def test_even_commands_stall_nowhere_and_a_pause_counts_without_its_period() -> None:
    assert stalled_share([commands()], RATE) == 0
    assert stalled_share([commands(pause=0.3)], RATE) == pytest.approx(0.9 / 2.9)
    assert longest_gap([commands(), commands(pause=0.3)]) == pytest.approx(0.35)


def test_a_smooth_seam_is_no_rougher_than_the_inside_and_a_jump_is() -> None:
    assert seam_ratio([commands()] * 2, RATE) < 1.1
    accelerations = commands(jump=0.05).accelerations(RATE)
    assert [len(each) for each in accelerations] == [6, 32]
    assert seam_ratio([commands(jump=0.05)] * 2, RATE) > 4


def test_lockstep_and_single_steps_have_no_such_figures() -> None:
    single = Commands(np.zeros(0), np.arange(40), np.zeros((40, 7)))
    assert stalled_share([single], RATE) is longest_gap([single]) is seam_ratio([single], RATE) is None
    assert stalled_share([], RATE) is longest_gap([]) is seam_ratio([], RATE) is None
