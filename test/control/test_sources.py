import math

from vla_ros.control.publishers import Continuity, DataSource, DataSources

MS = 1_000_000
A, B, C = DataSource(b"a"), DataSource(b"b"), DataSource(b"c")


def tell(sources: DataSources, said: list[tuple[DataSource, float]], patience: float = 0.5) -> list[bool]:
    return [sources.follows("j", source, round(at * 1000) * MS, patience) for source, at in said]


def contested(sources: DataSources, at: float) -> bool:
    return sources.competing(round(at * 1000) * MS) is not None


def test_one_source_is_followed_without_contest() -> None:
    sources = DataSources()
    assert all(tell(sources, [(A, index / 50) for index in range(100)]))
    assert not contested(sources, 2.0)


def test_the_first_source_is_followed_while_two_alternate() -> None:
    sources = DataSources()
    assert tell(sources, [(A, 0.0), (B, 0.01)]) == [True, False]
    assert not contested(sources, 0.01), "it may be the driver's successor"
    assert tell(sources, [(A, 0.02)]) == [True]
    found = sources.competing(20 * MS)
    assert (found.subject, {found.first, found.second}) == ("j", {A, B})
    assert tell(sources, [(B, 0.03), (A, 0.04)]) == [False, True]


def test_a_restarted_driver_is_followed_after_the_timeout() -> None:
    sources = DataSources()
    tell(sources, [(A, index / 50) for index in range(10)])  # until 0.18 s
    restarted = tell(sources, [(B, 0.3), (B, 0.6), (B, 0.7), (B, 0.8)])
    assert restarted == [False, False, True, True]
    assert not contested(sources, 0.8)


def test_repeated_restarts_are_no_contest() -> None:
    sources = DataSources()
    for index, source in enumerate((A, B, C, DataSource(b"d"))):
        tell(sources, [(source, index + step / 50) for step in range(20)])
        assert not contested(sources, index + 0.4)


def test_a_contest_ends_when_one_source_is_silent() -> None:
    sources = DataSources()
    tell(sources, [(A, 0.0), (B, 0.01), (A, 0.02)])
    tell(sources, [(A, 0.1 + index / 10) for index in range(30)])
    assert contested(sources, 2.0)
    assert not contested(sources, 2.1)


def test_a_slow_second_source_is_detected_at_each_message() -> None:
    sources = DataSources()
    for second in range(4):
        tell(sources, [(A, 5 * second + index / 50) for index in range(100)])
        assert not contested(sources, 5 * second + 1.99) or second == 0
        believed = tell(sources, [(B, 5 * second + 2.0), (A, 5 * second + 2.01)])
        assert believed == [False, True]
        assert contested(sources, 5 * second + 2.02)


def test_a_publisher_that_alternates_is_detected_but_a_single_change_is_not() -> None:
    small, large = DataSource(b"", "small"), DataSource(b"", "large")
    sources = DataSources()
    assert all(tell(sources, [(small, 0.0), (small, 0.1), (large, 0.2), (large, 0.3), (large, 0.4)]))
    assert not contested(sources, 0.4)
    sources = DataSources()
    tell(sources, [(small, 0.0), (large, 0.1), (small, 0.2), (small, 0.3)])
    assert not contested(sources, 0.3)
    sources = DataSources()
    tell(sources, [((small, large)[index % 2], index / 30) for index in range(8)])
    assert contested(sources, 0.3)


def test_different_damages_of_frames_are_no_contest() -> None:
    sources = DataSources()
    for index in range(40):
        kind = "camera" if index % 2 else f"camer{index}"
        assert sources.follows("j", DataSource(b"a", kind), index * 33 * MS, 0.5)
        assert not contested(sources, index * 0.033)


def test_a_jump_is_followed_once_it_has_lasted() -> None:
    here, there = DataSource(b"", 0), DataSource(b"", 1)
    sources = DataSources(settle=0.1)
    assert tell(sources, [(here, 0.0), (there, 0.02), (here, 0.04)]) == [True, False, True]
    assert tell(sources, [(there, 0.06), (there, 0.1), (there, 0.14), (there, 0.17)]) == [False, False, False, True]


def test_a_single_wrong_message_is_never_followed() -> None:
    here, there = DataSource(b"", 0), DataSource(b"", 1)
    sources = DataSources(settle=0.1)
    assert tell(sources, [(here, 0.0), (there, 0.3), (here, 0.33), (there, 0.6)]) == [True, False, True, False]


def tracks(course: list[tuple[float, float]], speed: float = 2.0) -> list[int]:
    continuity = Continuity()
    return [continuity.track({"j": position}, {"j": speed}, round(at * 1000) * MS) for position, at in course]


def test_a_joint_at_its_velocity_limit_continues_its_trajectory() -> None:
    fast = [(2.0 * index / 50, index / 50) for index in range(100)]
    assert set(tracks(fast)) == {0}
    assert set(tracks([(-position, at) for position, at in fast])) == {0}
    late = [(2.0 * index / 50, index / 50 + 0.05 * (index % 2)) for index in range(100)]
    assert set(tracks(late)) == {0}


def test_positions_too_far_apart_are_two_trajectories() -> None:
    course = [((0.0, 1.0)[index % 2], index / 50) for index in range(10)]
    assert tracks(course) == [0, 1] * 5
    assert set(tracks(course, speed=math.inf)) == {0}, "no limit, no contradiction"


def test_nan_continues_the_last_trajectory() -> None:
    assert tracks([(0.0, 0.0), (math.nan, 0.02), (1.0, 0.04), (math.inf, 0.06)]) == [0, 0, 1, 1]


def test_a_third_trajectory_is_none_of_the_first_two() -> None:
    course = [(0.0, 0.0), (1.0, 0.02), (2.0, 0.04), (1.0, 0.06)]
    assert tracks(course) == [0, 1, 2, 1]
    continuity = Continuity()
    kept = [continuity.track({"j": p}, {"j": 2.0}, round(at * 1000) * MS, keep={0}) for p, at in course]
    assert kept == [0, 1, 2, 3], "what is followed is remembered, and not what was damaged before"
    assert continuity.track({"j": 0.05}, {"j": 2.0}, 80 * MS, keep={0}) == 0


def test_one_joint_decides_for_the_whole_joint_state() -> None:
    continuity, speeds = Continuity(), {"a": 2.0, "b": 2.0}
    said = [{"a": 0.1, "b": 1.5}, {"a": 0.0, "b": 0.0}, {"a": 0.1}, {"b": 1.5}, {"a": 0.0}, {"b": 0.0}]
    numbers = [continuity.track(each, speeds, 20 * MS * at, keep={0}) for at, each in enumerate(said)]
    assert numbers[:4] == [0, 1, 0, 0], "a could be at 0, but not in the message in which b cannot"
    assert numbers[5] == 1
