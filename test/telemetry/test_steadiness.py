import numpy as np
import pytest

from vla_ros_lab.eval.results import Commands, steadiness

RATE = 20.0


def commands(jump: float = 0.0, pause: float = 0.0, *, timed: bool = True, length: int = 10) -> Commands:
    """40 steps of a slow wave; each chunk of ``length`` begins with a ``jump`` and after a ``pause``."""
    steps = np.arange(40)
    times = steps / RATE + pause * (steps // length)
    positions = 0.1 * np.sin(0.3 * steps)[:, None] + jump * (steps // length)[:, None]
    arrived = np.append(times, times[-1] + 1 / RATE) if timed else np.zeros(0)
    return Commands(arrived, steps // length, np.repeat(positions, 7, axis=1))


def figures(*episodes: Commands) -> dict[str, float]:
    return steadiness(episodes, RATE)


def test_even_commands_stall_nowhere_and_a_pause_counts_without_its_period() -> None:
    assert figures(commands())["stalled_share"] == 0
    assert figures(commands(pause=0.3))["stalled_share"] == pytest.approx(0.9 / 2.9)
    assert figures(commands(), commands(pause=0.3))["longest_gap_ms"] == pytest.approx(350)


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_a_smooth_seam_is_no_rougher_than_the_inside_and_a_jump_is(pause: float) -> None:
    assert figures(*[commands(pause=pause)] * 2)["seam_ratio"] < 1.1
    assert figures(*[commands(jump=0.05, pause=pause)] * 2)["seam_ratio"] > 4


def test_between_episodes_is_neither_gap_nor_seam() -> None:
    ahead = commands()
    later = Commands(ahead.times + 60, ahead.stamps + 9, ahead.positions + 1)
    one, two = figures(ahead), figures(ahead, later)
    assert two["longest_gap_ms"] == pytest.approx(one["longest_gap_ms"])
    assert two["seam_acceleration"] == pytest.approx(one["seam_acceleration"], rel=0.05)


def test_figures_without_enough_data_are_omitted() -> None:
    assert "stalled_share" not in figures(commands(timed=False), commands(timed=False))
    assert "seam_acceleration" in figures(commands())
    assert "seam_ratio" not in figures(commands()), "6 accelerations at seams"
    assert "acceleration" not in figures(commands(length=1))
    assert figures() == {}
