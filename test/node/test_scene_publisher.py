"""Which publisher of a scene is followed: the first, until it has left, and no one that was beside it."""

import pytest

from vla_ros.node.scene_publisher import ScenePublisher

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
NODES = {A: "/camera", B: "/other", C: "/third"}


def looks(
    publisher: ScenePublisher, begin: float, end: float, *there: bytes, names: dict[bytes, str] = NODES
) -> None:
    """Discovery shows ``there`` ten times a second."""
    for tenth in range(round(10 * begin), round(10 * end)):
        publisher.look({each: names[each] for each in there}, tenth / 10)


@pytest.fixture
def publisher() -> ScenePublisher:
    found = ScenePublisher("/obstacles")
    looks(found, 0, 1, A)
    assert found.follows(A, 1.0)
    looks(found, 1, 2, A)
    assert found.competing(2.0) is None
    return found


def test_a_second_publisher_is_not_followed_and_competes_while_it_is_there(publisher: ScenePublisher) -> None:
    looks(publisher, 2, 3, A, B)
    assert publisher.competing(3.0) is None, "it has sent nothing"
    assert not publisher.follows(B, 3.0)
    looks(publisher, 3, 60, A, B)
    found = publisher.competing(60.0)
    assert found is not None
    assert {found.first.publisher, found.second.publisher} == {A, B}
    looks(publisher, 60, 61, A)
    assert publisher.competing(61.0) is None
    assert publisher.follows(A, 61.0)


def test_one_that_was_beside_the_first_one_is_not_followed_when_that_has_died(publisher: ScenePublisher) -> None:
    for second in range(2, 6):
        looks(publisher, second, second + 1, A, B)
        publisher.follows(B, second + 0.5)
    looks(publisher, 6, 90, B)
    assert not publisher.follows(B, 90.0)
    assert publisher.competing(90.0) is not None
    looks(publisher, 90, 95)
    assert publisher.competing(95.0) is None, "it was ended as well"
    looks(publisher, 95, 96, C)
    assert publisher.follows(C, 96.0)


def test_one_that_comes_after_the_first_one_has_left_is_followed(publisher: ScenePublisher) -> None:
    looks(publisher, 2, 3)
    assert publisher.follows(B, 3.0), "at once, so that one message is enough"
    looks(publisher, 3, 5, B)
    assert publisher.competing(5.0) is None
    assert not publisher.follows(A, 5.0)


def test_one_that_comes_just_after_the_first_one_has_left_is_followed_soon(publisher: ScenePublisher) -> None:
    looks(publisher, 2, 2.1, B)
    assert not publisher.follows(B, 2.1)
    looks(publisher, 2.1, 3, B)
    assert publisher.follows(B, 3.0)
    assert publisher.competing(3.0) is None


def test_a_node_that_was_killed_and_started_again_is_followed(publisher: ScenePublisher) -> None:
    """Discovery shows a killed node until its lease ends."""
    again = {**NODES, C: "/camera"}
    looks(publisher, 2, 3, A, C, names=again)
    assert not publisher.follows(C, 2.5), "the first one may still be there"
    assert publisher.follows(C, 3.5)
    looks(publisher, 4, 12, A, C, names=again)
    assert publisher.competing(12.0) is None


def test_ids_that_discovery_does_not_know() -> None:
    """Messages of Cyclone DDS under rclpy have other ids than discovery."""
    x, y = b"x", b"y"
    publisher = ScenePublisher("/obstacles")
    looks(publisher, 0, 1, A)
    assert publisher.follows(x, 1.0)
    looks(publisher, 1, 3, A, B)
    assert not publisher.follows(y, 3.0)
    looks(publisher, 3, 4, A, B)
    assert publisher.competing(4.0) is not None
    looks(publisher, 4, 8, A)
    assert publisher.competing(8.0) is None
    looks(publisher, 8, 10)
    looks(publisher, 10, 11, C)
    assert not publisher.follows(b"z", 11.0), "discovery may be late"
    looks(publisher, 11, 12, C)
    assert publisher.follows(b"z", 12.0)


def test_messages_without_ids_are_followed_and_discovery_tells_who_competes() -> None:
    publisher = ScenePublisher("/obstacles")
    looks(publisher, 0, 1, A)
    assert publisher.follows(b"", 1.0)
    assert publisher.competing(1.0) is None
    looks(publisher, 1, 2, A, B)
    assert publisher.follows(b"", 2.0)
    assert publisher.competing(2.0) is not None


def test_without_discovery_only_the_first_one_is_followed() -> None:
    publisher = ScenePublisher("/obstacles")
    assert publisher.follows(A, 0.0)
    assert [publisher.follows(B, float(second)) for second in range(100)] == [False] * 100
    assert publisher.competing(100.0) is not None
    assert publisher.competing(103.0) is None
