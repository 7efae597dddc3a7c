import io
import json
import os
import pty
import subprocess
import sys
import termios
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from vla_ros.cli.teach import Teacher
from vla_ros.graph.messages import message_types
from vla_ros.graph.qos import PROFILES


class Graph:
    """Notes what is called and published; answers at once."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.qos = PROFILES.__getitem__

    def message(self, kind: str) -> Any:
        return message_types("jazzy").message(kind)

    def service(self, kind: str) -> Any:
        return SimpleNamespace(Request=lambda **fields: fields)

    def create_node(self, name: str) -> Any:
        return self

    def create_subscription(self, *_: Any) -> None: ...

    def create_publisher(self, *_: Any) -> Any:
        return SimpleNamespace(publish=lambda message: self.said.append(message.data))

    def create_client(self, _: Any, name: str) -> Any:
        def call(request: Any) -> Future[Any]:
            self.said.append((name.rpartition("/")[2], request.get("data")))
            future: Future[Any] = Future()
            future.set_result(SimpleNamespace(success=True, message="as you say"))
            return future

        return SimpleNamespace(service_is_ready=lambda: True, call_async=call)


class Watch:
    """A teacher, its graph and its clock."""

    def __init__(self, mode: str) -> None:
        self.now, self.graph = 100.0, Graph()
        self.teacher = Teacher(self.graph, "/vla_policy", lambda: self.now)
        self.is_in(mode)

    def is_in(self, mode: str) -> None:
        said = {"state": "armed", "mode": mode, "source": "policy", "explanation": f"{mode} state"}
        self.teacher._on_status(SimpleNamespace(data=json.dumps(said)))

    def press(self, keys: str, after: float = 1.0) -> list[Any]:
        self.graph.said.clear()
        for key in keys:
            self.now += after
            self.teacher.press(key)
        return self.graph.said


@pytest.mark.parametrize(
    ("mode", "key", "does"),
    [
        ("autonomous", " ", ("pause", None)),
        ("correcting", " ", ("pause", None)),
        ("paused", " ", ("pause", None)),
        ("paused", "c", ("takeover", False)),
        ("autonomous", "\t", ("takeover", True)),
        ("paused", "\t", ("takeover", True)),
        ("correcting", "\t", ("pause", None)),
        ("autonomous", "s", "success"),
        ("paused", "f", "failure"),
        ("correcting", "r", "discard"),
        ("autonomous", "\x1b", "end"),
    ],
)
def test_each_key(mode: str, key: str, does: Any) -> None:
    watch = Watch(mode)
    assert watch.press(key) == [does]
    assert watch.teacher.ended == (key == "\x1b")


def test_a_key_that_is_held_down_counts_once_and_what_is_unknown_pauses() -> None:
    watch = Watch("paused")
    assert watch.press("ccccc", after=0.4) == [("takeover", False)], "the policy continues once"
    watch.is_in("autonomous")
    assert watch.press("  ", after=0.1) == [("pause", None)] * 2
    watch.is_in("paused")
    assert watch.press("   ") == [("pause", None)] * 3, "space never lets the policy continue"
    assert watch.press(" ", after=10.0) == [("pause", None)], "the status is old"
    assert watch.press("x\n") == []


def test_mode_time_episode_and_labels_are_shown() -> None:
    watch = Watch("correcting")
    for event in ({"event": "episode_start", "episode": 3}, {"event": "episode_end", "label": "success"}) * 2:
        watch.teacher._on_event(SimpleNamespace(data=json.dumps(event)))
    watch.teacher._on_event(SimpleNamespace(data=json.dumps({"event": "episode_start", "episode": 4})))
    watch.press("s")
    watch.now += 1.0
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(watch.teacher.render())
    text = console.export_text()
    for expected in (
        "correcting for 2 s",
        "4, 2 s",
        "2 success, 0 failure",
        "correcting state",
        "labelled success",
    ):
        assert expected in text


def test_without_a_terminal_the_error_says_so_and_in_one_esc_leaves() -> None:
    command = [sys.executable, "-m", "vla_ros.cli", "teach", "--backend", "dds"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, "from a terminal" in done.stderr) == (1, True)
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL) as process:
        for _ in range(100):
            os.write(ours, b"\x1b[A")  # an arrow, which is no esc
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            if terminal_is_raw(theirs):
                break
        assert process.poll() is None
        os.write(ours, b"\x1b")
        assert process.wait(30) == 0
    assert not terminal_is_raw(theirs)
    os.close(ours)
    os.close(theirs)


def terminal_is_raw(terminal: int) -> bool:
    return not termios.tcgetattr(terminal)[3] & termios.ICANON
