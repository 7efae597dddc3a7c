"""Obstacles that move, from a topic of markers."""

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from vla_ros.collision.meshes import SceneMeshes
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.publishers import CompetingSources, gid_of, node_of
from vla_ros.errors import VlaRosError
from vla_ros.execution.context import Context
from vla_ros.graph.origin import Origin
from vla_ros.graph.wiring import Wiring
from vla_ros.kinematics.urdf import resolve
from vla_ros.node.beside import BesideThread
from vla_ros.node.collision_view import SHOWN, CollisionView
from vla_ros.node.markers import MARKERS, MarkerReader, Scene
from vla_ros.node.scene_publisher import ScenePublisher
from vla_ros.types import JointState

_UNKNOWN = Origin()  # of a message that a middleware without origins delivers
_PERIOD = 0.1  # s between looks for obstacles whose lifetime has ended, for meshes and for publishers
_LOOK = 1.0  # s between looks for the nearest two bodies, for diagnostics
_NEAR = 0.05  # s between a marker's stamp and a joint state
_MOST_BYTES = 128 << 10  # of a message; a scene of 200 markers has a third of this
_WAITING = 16  # messages


def join_collision(context: Context, wiring: Wiring, check: CollisionCheck | None) -> "SceneTopic | None":
    """Connect the collision check of a node with its clock, ``collision.scene`` and ``~/collision``."""
    if check is None or check.world is None:
        return None
    check.steady = context.clock.steady
    BesideThread(context, wiring, "vla_collision", _LOOK, check.look)
    view = CollisionView(context, wiring, check)
    BesideThread(context, wiring, "vla_collision_view", SHOWN, view.show)
    name = context.options.current.collision.scene
    if not name:
        return None
    inputs, node = context.inputs, wiring.node

    def joints_at(stamp: int) -> Mapping[str, JointState]:
        return inputs.joints_at(stamp, _NEAR) if stamp else inputs.snapshot.arms

    def publishers() -> dict[bytes, str]:
        found = node.get_publishers_info_by_topic(node.resolve_topic_name(name))
        return {gid_of(endpoint.endpoint_gid): node_of(endpoint) for endpoint in found}

    topic = SceneTopic(context, wiring, check, joints_at, publishers)
    SceneQueue(context, wiring, topic)
    return topic


class SceneTopic:
    """Takes the markers of ``collision.scene`` as obstacles, those of one publisher.

    One thread calls :meth:`take` and :meth:`refresh`; messages of another publisher change nothing.
    """

    def __init__(
        self,
        context: Context,
        wiring: Wiring,
        check: CollisionCheck,
        joints_at: Callable[[int], Mapping[str, JointState]] = lambda _: MappingProxyType({}),
        publishers: Callable[[], Mapping[bytes, str]] | None = None,
    ) -> None:
        config = context.options.current
        self._context, self._check = context, check
        self.name = config.collision.scene
        self._meshes = SceneMeshes(config.collision.scene_meshes, resolve(config.arms[0].robot.urdf))
        self._reader = MarkerReader(check, self._meshes.find, joints_at)
        self._scene: Scene = {}
        self._unusable = set[str]()  # why meshes cannot be used, as it was logged
        self._publisher = ScenePublisher(self.name)
        if publishers is not None:
            wiring.timer(_PERIOD, lambda: self._publisher.look(publishers(), check.steady()))

    def take(self, message: Any, origin: Origin = _UNKNOWN, published: float | None = None) -> None:
        """Take a message. One that is not understood changes nothing, so that a required scene becomes stale.

        ``published`` is when it was published, s of ``Clock.awake``; by default, it arrives now.
        """
        age = 0.0
        if origin.published:  # a busy node may read it late
            if published is None:
                published = self._context.suspension.note_arrival(*origin)
            age = max(0.0, self._context.clock.awake() - published)
        now = self._check.steady()
        if not self._publisher.follows(origin.publisher, now):
            self.refuse("it comes from a second publisher; end one, and restart the other one")
            return
        try:
            scene = self._reader.apply(message.markers, self._scene, now)
            self._check.set_scene([each.body for each in scene.values()], age=age)
        except (VlaRosError, ValueError, TypeError, OverflowError, RuntimeError) as error:
            self.refuse(str(error))
            return
        self._scene = scene
        self._say_what_is_unknown()

    def refuse(self, why: str) -> None:
        """Log that a message is ignored."""
        self._context.throttled.log("scene", f"a message on {self.name} was ignored: {why}", "error")

    def refresh(self) -> None:
        """Remove obstacles whose lifetime has ended, and take the meshes as they are now."""
        unusable = self._meshes.prepare()
        for why in set(unusable) - self._unusable:
            self._context.throttled.log(f"scene mesh {why}", why, "warning")
        self._unusable, now = set(unusable), self._check.steady()
        kept = {key: each.renewed(self._meshes.find) for key, each in self._scene.items() if each.ends > now}
        if len(kept) == len(self._scene) and all(each is self._scene[key] for key, each in kept.items()):
            return
        self._scene = kept
        self._check.set_scene([each.body for each in kept.values()], age=None)
        self._say_what_is_unknown()

    def watch(self, silent: Callable[[], float]) -> None:
        """Let the arm hold while the thread that calls :meth:`refresh` has been ``silent`` for too long, s."""
        self._check.scene_silent = silent

    def competing(self) -> CompetingSources | None:
        """Return the publisher that is followed and another one, while there are two."""
        return self._publisher.competing(self._check.steady())

    def close(self) -> None:
        self._meshes.close()

    def _say_what_is_unknown(self) -> None:
        for each in self._scene.values():
            if each.body.unknown:
                text = f"{self.name}: {each.body.name} holds the arm: {each.body.unknown}"
                self._context.throttled.log("scene unknown", text, "warning")
                return


class SceneQueue:
    """Passes the messages of ``collision.scene`` from the graph thread to a thread of its own."""

    def __init__(self, context: Context, wiring: Wiring, topic: SceneTopic) -> None:
        self._context, self._topic, self._graph = context, topic, wiring.graph
        self._type = wiring.graph.message(MARKERS)
        self._waiting = deque[tuple[bytes, Origin, float]]()
        wiring.on_close(topic.close)
        self._thread = BesideThread(context, wiring, "vla_scene", _PERIOD, self.work)
        topic.watch(lambda: self._thread.silent)
        wiring.subscribe_raw(MARKERS, topic.name, self.receive, "joint_states")  # a second publisher is heard

    def receive(self, cdr: Any, origin: Origin = _UNKNOWN) -> None:
        """Keep a message. Runs on the graph thread, so that it only looks at the size."""
        published = self._context.suspension.note_arrival(*origin)
        if len(cdr) > _MOST_BYTES:
            self._topic.refuse(f"found {len(cdr)} bytes, expected at most {_MOST_BYTES}")
        elif len(self._waiting) >= _WAITING:
            self._topic.refuse(f"{_WAITING} messages wait already; publish less often")
        else:
            self._waiting.append((bytes(cdr), origin, published))
            self._thread.wake()

    def work(self) -> None:
        for _ in range(len(self._waiting)):
            self._read(*self._waiting.popleft())
        self._topic.refresh()

    def _read(self, cdr: bytes, origin: Origin, published: float) -> None:
        try:
            message = self._graph.deserialize(cdr, self._type)
        except Exception as error:  # a middleware raises whatever it likes on damaged bytes
            self._topic.refuse(f"it cannot be read ({type(error).__name__}: {error})")
            return
        self._topic.take(message, origin, published)
