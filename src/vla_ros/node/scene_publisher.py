"""Which publisher of the scene is followed, and who else publishes. Pure logic."""

from collections.abc import Mapping

from vla_ros.control.publishers import CompetingSources, DataSource

_SILENT = 2.0  # s after which a publisher that discovery cannot identify counts as silent
_GONE = 0.5  # s for which discovery must not show a publisher that has left
_MOST = 64  # publishers that are remembered


class ScenePublisher:
    """Follows the first publisher of a topic, until it has left and another one comes.

    One that published beside it is not followed when the first one has ended, because what it sees is not the whole
    scene. A restarted node is the same publisher, though its id is another one. A middleware may report ids that
    discovery does not know (Cyclone DDS under rclpy); then the number of publishers and their nodes tell.
    Times are s of a steady clock. One thread calls :meth:`follows`, another one the other methods.

    Args:
        topic: The topic's name.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._followed: bytes | None = None
        self._node, self._heard = "", 0.0  # of the one that is followed: its node's name, and its last message
        self._there = 0.0  # when a message or discovery has shown it
        self._missed: float | None = None  # since when discovery does not show it any more
        self._is_seen = False  # discovery has shown it
        self._others: dict[bytes, tuple[float, float]] = {}  # when their first and last messages came
        self._beside: frozenset[bytes] = frozenset()  # others during which the one that is followed was there
        self._found: Mapping[bytes, str] = {}  # publishers in discovery, with their nodes' names
        self._is_known = False  # discovery knows the ids that messages have
        self._is_anonymous = False  # messages have none

    def look(self, found: Mapping[bytes, str], now: float) -> None:
        """Take what discovery shows: the ids of the topic's publishers, and the names of their nodes."""
        self._found = found
        if self._followed is None:
            return
        self._is_known = self._is_known or self._followed in found or any(each in found for each in self._others)
        more = not self._is_known and self._missed is None and len(found) > len(self._others)
        if self._followed in found or more:  # without ids, more publishers than the others: it is there
            self._there, self._is_seen = now, True
            self._missed, self._node = None, self._node_of(self._followed) or self._node
        elif self._missed is None and self._is_seen:
            self._missed = now
        self._others = {
            each: (first, last)
            for each, (first, last) in self._others.items()
            if each in found or now - last <= _SILENT
        }
        self._beside = frozenset(
            each for each in self._others if each in self._beside or self._others[each][0] < self._there
        )

    def follows(self, publisher: bytes, now: float) -> bool:
        """Record a message; return True if it comes from the publisher that is followed.

        ``publisher`` is b"" if the middleware does not provide an id: then all are followed, and discovery tells
        whether they compete.
        """
        if not publisher:
            self._is_anonymous = True
            return True
        if self._followed is None or publisher == self._followed or self._succeeds(publisher, now):
            if publisher != self._followed:
                self._followed, self._node, self._is_seen = publisher, self._node_of(publisher), False
                self._others = {each: times for each, times in self._others.items() if each != publisher}
            self._heard, self._there, self._missed = now, now, None
            return True
        first, _ = self._others.get(publisher, (now, now))
        others = {each: times for each, times in self._others.items() if each != publisher}
        self._others = dict([*others.items(), (publisher, (first, now))][-_MOST:])
        return False

    def competing(self, now: float) -> CompetingSources | None:
        """Return the publisher that is followed and one that published beside it and is still there, or None."""
        if self._is_anonymous and len(self._found) > 1:
            first, second, *_ = self._found
            return CompetingSources(self._topic, DataSource(first), DataSource(second))
        there = [each for each, (_, last) in self._others.items() if each in self._found or now - last <= _SILENT]
        if self._followed is None or not there:
            return None
        return CompetingSources(self._topic, DataSource(self._followed), DataSource(there[0]))

    def _succeeds(self, publisher: bytes, now: float) -> bool:
        """Tell whether a publisher takes the place of the one that is followed, which has left."""
        name = self._node_of(publisher)
        if name and name == self._node:
            return now - self._heard > _SILENT  # restarted; discovery may show one that was killed for a while
        since = self._others.get(publisher, (now, now))[0]
        left = self._missed is not None and now - self._missed > _GONE and (self._is_known or now - since > _GONE)
        return left and publisher not in self._beside

    def _node_of(self, publisher: bytes | None) -> str:
        """Return the name of a publisher's node, or "" if it is unknown."""
        nodes = set(self._found.values())
        return self._found.get(publisher or b"", "") or (nodes.pop() if len(nodes) == 1 else "")
