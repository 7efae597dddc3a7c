"""Whatever arrives on ``collision.scene``, a stop is heard: messages at random, and a second publisher."""

import contextlib
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_ros.control.safety import State
from vla_ros.errors import VlaRosError
from vla_ros.graph import open_graph

CHECK = ("collision.check:=true", "collision.deceleration:=20.0", "collision.scene:=/obstacles")
IN_FORCE = 0.2  # s
GRAPH = 0.02  # s that a message may keep the graph thread


def scan(path: Path, count: int) -> None:
    """Write a sphere of about ``2 * count**2`` triangles with bumps."""
    u, v = np.meshgrid(np.linspace(0, 2 * np.pi, count), np.linspace(0.01, np.pi, count), indexing="ij")
    radius = 1 + 0.2 * np.sin(7 * u) * np.sin(5 * v)
    grid = radius[..., None] * np.stack((np.cos(u) * np.sin(v), np.sin(u) * np.sin(v), np.cos(v)), axis=-1)
    a, b, c, d = grid[:-1, :-1], grid[1:, :-1], grid[1:, 1:], grid[:-1, 1:]
    record = np.zeros(2 * (count - 1) ** 2, dtype=[("normal", "<3f4"), ("corners", "<9f4"), ("rest", "<u2")])
    both = [np.stack(each, axis=2).reshape(-1, 9) for each in ((a, b, c), (a, c, d))]
    record["corners"] = np.concatenate(both)
    path.write_bytes(b"\0" * 80 + len(record).to_bytes(4, "little") + record.tobytes())


class Messages:
    """Random messages: sound, huge, damaged, with numbers that are none, with meshes that are large or change."""

    def __init__(self, graph: Any, folder: Path, seed: int) -> None:
        self.make, self.serialize, self.rng = graph.message, graph.serialize, random.Random(seed)
        self.meshes = [folder / "small.stl", folder / "changes.stl", folder / "large.stl", folder / "secret.stl"]
        for mesh, count in zip(self.meshes, (20, 60, 220, 20), strict=True):
            scan(mesh, count)

    def any(self) -> Any:
        rng = self.rng
        kind = rng.choice(["cubes", "points", "mesh", "mesh", "numbers", "text", "damaged", "noise"])
        count = rng.choice((1, 2, 50, 200, 2_000))
        if kind == "noise":
            return b"\0\1\0\0" + rng.randbytes(rng.choice((0, 10, 1_000, 200_000)))
        if kind == "points":
            return self.array([self.marker(type=rng.choice((6, 7)), count=rng.choice((10, 300, 5_000, 60_000)))])
        if kind == "mesh":
            mesh = rng.choice(self.meshes)
            if mesh.name == "changes.stl":
                scan(mesh, rng.choice((10, 90)))
            many = [self.marker(type=10, mesh_resource=str(mesh)) for _ in range(rng.choice((1, 10)))]
            return self.array(many)
        if kind == "numbers":
            wild = rng.choice((float("nan"), float("inf"), 1e300, -1.0, 0.0))
            return self.array([self.marker(wild=wild)])
        if kind == "text":
            return self.array([self.marker(ns="x" * rng.choice((10, 100_000)), text="\x1b[2J" * 1_000)])
        cubes = self.array([self.marker(type=rng.choice((1, 2, 3, 9)), id=number) for number in range(count)])
        if kind == "cubes":
            return cubes
        damaged = bytearray(self.serialize(cubes))
        for _ in range(rng.choice((1, 5))):
            damaged[rng.randrange(4, len(damaged))] = rng.randrange(256)
        return bytes(damaged[: rng.choice((len(damaged), rng.randrange(4, len(damaged))))])

    def array(self, markers: list[Any]) -> Any:
        return self.make("visualization_msgs/msg/MarkerArray")(markers=markers)

    def marker(self, wild: float = 0.1, count: int = 0, **fields: Any) -> Any:
        found, point = self.make("visualization_msgs/msg/Marker")(), self.make("geometry_msgs/msg/Point")
        found.pose.position.x, found.pose.orientation.w = 3.0 + self.rng.random(), 1.0
        found.scale.x, found.scale.y, found.scale.z = wild, 0.1, self.rng.uniform(0.01, 1)
        found.points = [point(x=3.0, y=0.001 * number, z=0.0) for number in range(count)]
        for name, value in fields.items():
            setattr(found, name, value)
        return found


def used(thread: threading.Thread) -> float:
    """Seconds of processor time that a thread has used."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def test_whatever_message_arrives_a_stop_is_in_force_soon(robot: Any, inside: Any, tmp_path: Path) -> None:
    """The process's own time counts, so that another process's load does not: nothing else computes for long."""
    messages = Messages(robot.graph, tmp_path, seed=int(time.time()))
    named = [str(mesh) for mesh in messages.meshes[:3]]
    node = inside(*CHECK, f"collision.scene_meshes:={named}")
    array = robot.graph.message("visualization_msgs/msg/MarkerArray")
    scene = robot.node.create_publisher(array, "/obstacles", robot.graph.qos("default"))
    robot.until(lambda: robot.says("armed"), robot.send_frame)
    [spinning] = [thread for thread in threading.enumerate() if thread.name == "graph"]
    pause = threading.Event()
    ready = [messages.any() for _ in range(40)]  # making them takes this process's time as well
    for message in ready:
        robot.send_frame()
        before = used(spinning)
        with contextlib.suppress(VlaRosError):  # the middleware does not send all that is damaged
            for _ in range(3):
                scene.publish(message)
        pause.wait(messages.rng.uniform(0, 0.1))  # the node is anywhere in its work
        robot.stop()
        begin, processor = time.monotonic(), time.process_time()
        while node.safety.state is not State.STOPPED:
            assert time.monotonic() < begin + 20, message
            time.sleep(0.001)
        took, graph = time.process_time() - processor, used(spinning) - before
        assert (took < IN_FORCE, graph < 3 * GRAPH + 0.05) == (True, True), (took, graph, str(message)[:300])
        assert node._loop.alive
        node.reset()
        robot.until(lambda: node.enable(True)[0], robot.send_frame)
    assert "thread_died" not in robot.reported


@pytest.mark.causes("scene_stale")
def test_while_the_thread_of_the_scene_hangs_nothing_moves(
    robot: Any, inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The obstacles would be those of before; the scene is not even required."""
    from vla_ros.node.markers import MarkerReader

    inside(*CHECK)
    go_on, apply = threading.Event(), MarkerReader.apply
    array = robot.graph.message("visualization_msgs/msg/MarkerArray")
    scene = robot.node.create_publisher(array, "/obstacles", robot.graph.qos("default"))
    robot.until(lambda: robot.says("armed"), robot.send_frame)

    def hangs(*arguments: Any) -> Any:
        go_on.wait(60.0)
        return apply(*arguments)

    monkeypatch.setattr(MarkerReader, "apply", hangs)
    try:
        scene.publish(array())
        robot.until(lambda: "scene_stale" in robot.status["holds"], robot.send_frame)
        found = re.search(r"/obstacles: its thread has not come back for ([\d.]+) s", str(robot.status["holds"]))
        assert found
        assert 1.0 <= float(found[1]) < 3.0
    finally:
        go_on.set()
    robot.until(lambda: not robot.status["holds"], robot.send_frame)


def test_an_error_in_the_thread_of_the_scene_stops_the_arm(
    robot: Any, inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vla_ros.node.markers import MarkerReader

    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    node = inside(*CHECK)
    array = robot.graph.message("visualization_msgs/msg/MarkerArray")
    scene = robot.node.create_publisher(array, "/obstacles", robot.graph.qos("default"))
    robot.until(lambda: robot.says("armed"), robot.send_frame)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("by the test")

    monkeypatch.setattr(MarkerReader, "apply", fails)

    def send() -> None:
        scene.publish(array())
        robot.send_frame()

    robot.until(lambda: robot.says("stopped") and seen, send)
    assert "ZeroDivisionError" in str(robot.status)
    assert len(seen) == 1
    node.reset()
    armed, why = node.enable(True)
    assert not armed, "the arm would move through obstacles that nobody reads any more"
    assert "thread_died" in why
    assert "start the node again" in why


@pytest.mark.causes("scene_contested")
def test_a_second_publisher_of_the_scene_holds_the_arm_and_both_are_named(robot: Any, inside: Any) -> None:
    node = inside(*CHECK, "collision.scene_required:=true")
    make, qos = robot.graph.message, robot.graph.qos
    array, marker = make("visualization_msgs/msg/MarkerArray"), make("visualization_msgs/msg/Marker")()
    marker.type, marker.pose.position.x, marker.pose.orientation.w = 1, 3.0, 1.0
    marker.scale.x = marker.scale.y = marker.scale.z = 0.1
    first = robot.node.create_publisher(array, "/obstacles", qos("state_publisher"))

    def send() -> None:
        first.publish(array(markers=[marker]))
        robot.send_frame()

    robot.until(lambda: robot.says("armed") and len(node._pipeline.controller.collision.scene) == 1, send)
    with open_graph("dds") as graph:
        other = graph.create_node("intruder")
        second = other.create_publisher(
            graph.message("visualization_msgs/msg/MarkerArray"), "/obstacles", qos("default")
        )
        clear = graph.message("visualization_msgs/msg/Marker")(action=3)

        def both() -> None:
            send()
            second.publish(graph.message("visualization_msgs/msg/MarkerArray")(markers=[clear]))

        robot.until(lambda: robot.says("scene_contested"), both)
        robot.until(lambda: "/intruder" in robot.status["holds"].get("scene_contested", ""), both)
        assert "/driver" in robot.status["holds"]["scene_contested"]
        assert len(node._pipeline.controller.collision.scene) == 1, "the first one's obstacle is still there"
    robot.until(lambda: "scene_contested" not in robot.status["holds"] and robot.says("armed"), send)
