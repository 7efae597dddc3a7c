"""The console's process beside a running node: who is let in, what is obeyed, and that it changes nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from tools.chromium import wait
from vla_ros.cli.main import main
from vla_ros.console.admission import HOLD
from vla_ros.control.safety import State
from vla_ros.graph import open_graph

from .conftest import Console


class Client:
    """A page without a browser: it sees what a page sees, and asks as it does."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.id = socket, 0
        self.beat, self.view = "", dict[str, Any]()

    def look(self, until: Any = lambda view: True, patience: float = 60.0) -> dict[str, Any]:
        """Receive until a view satisfies ``until``; newer ones that wait are taken first."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            said = self.socket.recv(patience)
            if isinstance(said, bytes):
                continue
            told = json.loads(said)
            self.beat, self.view = told["beat"], told["view"] or {}
            self.socket.send(json.dumps({"seen": self.beat}))
            if self.view and until(self.view):
                return self.view
        raise AssertionError(f"not within {patience} s: {self.view}")

    def fresh(self) -> dict[str, Any]:
        """Return what is on the screen now, not what has waited in the socket's buffer."""
        began = time.monotonic()
        while True:
            before = time.monotonic()
            view = self.look()
            if time.monotonic() - before > 0.03 or time.monotonic() - began > 5.0:
                return view

    def request(self, do: str, text: str = "") -> str:
        self.id += 1
        fields = {"do": do, "id": self.id, "beat": self.beat, "number": self.view["number"], "text": text}
        return json.dumps(fields | {"by": "test"})

    def ask(self, do: str, text: str = "") -> str:
        """Ask about what is on the screen now."""
        self.fresh()
        said = self.request(do, text)
        self.socket.send(said)
        return said

    def hold(self, what: str) -> str:
        """Press, hold, ask: the act; again if the state has changed meanwhile, as on a busy machine it does."""
        while True:
            before = self.look()["acts"][-1:]
            self.ask("press", what)
            self.keep_pressed()
            said = self.ask(what)
            last = self.look(lambda view, old=before: view["acts"] and view["acts"][-1:] != old)["acts"][-1]
            if not any(why in last[3] for why in ("the state has changed", "over a second old", "hold it")):
                return said

    def keep_pressed(self) -> None:
        """Receive for as long as a button must be held."""
        end = time.monotonic() + HOLD + 0.4
        while time.monotonic() < end:
            self.look()

    def answer(self, text: str) -> dict[str, Any]:
        """Wait until the list of actions ends with one that says ``text``."""
        return self.look(lambda view: view["acts"] and text in json.dumps(view["acts"][-1]))


@pytest.fixture
def page(robot, arm, inside, console) -> Any:
    """A disarmed node with an instruction, a console, and a page of it."""
    node, served = inside("control.armed:=false"), console()
    with served.connect() as socket:
        client = Client(socket)
        client.look(lambda view: view["state"] == "disarmed")
        yield node, served, client


def status_of(console: Console, path: str, **headers: str) -> int:
    request = urllib.request.Request(f"http://{console.host}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_a_page_with_the_token_under_the_servers_own_name_is_let_in(robot, console) -> None:
    served = console()
    here = f"/?token={served.token}"
    assert status_of(served, "/healthz") == 200
    assert status_of(served, here) == 200
    assert [status_of(served, path) for path in ("/", "/?token=", "/?token=guess", f"{here}&token=x")] == [403] * 4
    for path in ("/healthz", here):
        assert status_of(served, path, Host="evil.example") == 403
        assert status_of(served, path, Host="evil.example", Origin=f"http://{served.host}") == 403
    assert status_of(served, "/live") in (404, 405), "there is no other way in than the websocket"
    for refused in (
        {"token": "guess"},
        {"token": served.token[:-1]},
        {"origin": None},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": f"https://{served.host}"},
        {"name": "evil.example"},
    ):
        with pytest.raises(InvalidStatus) as error, served.connect(**refused):
            pass
        assert error.value.response.status_code == 403, refused
    with served.connect():
        pass
    assert served.token not in served.text.partition("\n")[2], "no line of the log has the token"
    assert "wrong origin or token" in served.text
    assert served.end() == 0


def test_the_page_lets_nothing_else_in_and_leaks_its_address_to_nobody(robot, console) -> None:
    served = console()
    with urllib.request.urlopen(served.url, timeout=10) as answer:
        headers, text = answer.headers, answer.read().decode()
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not [word for word in ("http://", "https://", "innerHTML", "eval(") if word in text]
    for _ in range(2):  # the terminal's and that of `ros2 launch`
        served.process.send_signal(signal.SIGINT)
    assert served.process.wait(15) == 0, served.text


def test_a_node_is_operated_and_each_action_is_logged_with_its_origin(page, capfd) -> None:
    node, served, client = page
    client.hold("arm")
    client.look(lambda view: view["state"] == "armed")
    assert node.safety.armings == 1
    client.ask("instruct", "wave at the door")
    client.look(lambda view: view["instruction"] == "wave at the door")
    client.ask("pause")
    client.look(lambda view: view["mode"] == "paused")
    client.ask("correct")
    client.answer("takeover.input is none")
    client.hold("continue")
    client.look(lambda view: view["mode"] == "autonomous")
    client.ask("label", "success")
    client.look(lambda view: view["episode"]["labels"] == [[1, "success"]])
    client.ask("record", "on")
    client.answer("no recorder runs")
    client.ask("disarm")
    client.look(lambda view: view["state"] == "disarmed")
    client.hold("arm")
    client.look(lambda view: view["state"] == "armed")
    client.ask("stop")
    stopped = client.look(lambda view: view["state"] == "stopped")
    assert stopped["reasons"][0]["name"] == "operator_stop"
    assert "reset" in stopped["reasons"][0]["advice"]
    client.ask("reset")
    client.look(lambda view: view["state"] == "disarmed")
    assert node.safety.armings == 2
    for act in (
        "arm",
        "instruct wave at the door",
        "pause",
        "continue",
        "label success",
        "disarm",
        "stop",
        "reset",
    ):
        assert f"/vla_policy: {act} from 127.0.0.1:" in served.text
    assert "page 1 by test" in served.text


def test_joints_are_shown_as_measured_and_commanded_and_cameras_beside_what_the_policy_sees(page) -> None:
    _, _, client = page
    client.look(lambda view: view["images"] == ["/camera/image_raw", "/vla_policy/debug_image"])
    got = set[int]()
    deadline = time.monotonic() + 20.0
    while got != {0, 1} and time.monotonic() < deadline:
        said = client.socket.recv(20.0)
        if isinstance(said, bytes):
            assert said[1:3] == b"\xff\xd8", "a JPEG"
            got.add(said[0])
        else:
            client.socket.send(json.dumps({"seen": json.loads(said)["beat"], "images": True}))
    assert got == {0, 1}
    client.hold("arm")
    joints = client.look(lambda view: "commanded" in view["view"].get("arms", {}).get("arm", {}))["view"]["arms"][
        "arm"
    ]
    assert joints["commanded"].keys() >= joints["measured"].keys() == {f"joint_{number}" for number in range(1, 8)}
    assert abs(joints["commanded"]["joint_2"] - joints["measured"]["joint_2"]) < 0.5
    client.look(lambda view: view["minute"] and view["minute"][-1]["p99"])


def test_requests_that_are_replayed_delayed_or_of_another_connection_arm_nothing(page) -> None:
    node, served, client = page
    client.hold("arm")
    client.look(lambda view: view["state"] == "armed")
    said = client.hold("arm")
    client.ask("disarm")
    client.look(lambda view: view["state"] == "disarmed")
    client.socket.send(said)
    client.answer("made before")
    with served.connect() as other:
        other.send(said)
        Client(other).look(lambda view: "over a second old" in json.dumps(view["acts"][-1]))
    client.ask("press", "arm")
    late = client.request("arm")
    end = time.monotonic() + 1.3
    while time.monotonic() < end:
        client.look()
    client.socket.send(late)
    client.answer("over a second old")
    client.ask("arm")
    client.answer("hold it")
    assert node.safety.armings == 1
    assert node.safety.state is State.DISARMED


def test_a_change_of_the_state_by_anybody_voids_what_was_on_the_screen(page) -> None:
    node, served, client = page
    with served.connect() as second:
        other = Client(second)
        client.ask("press", "arm")
        other.look()
        other.ask("stop")
        assert client.look(lambda view: view["state"] == "stopped")
        other.look(lambda view: view["state"] == "stopped")
        other.ask("reset")
        client.look(lambda view: view["state"] == "disarmed")
        client.keep_pressed()
        client.ask("arm")
        client.answer("the state has changed since the press")
    assert node.safety.armings == 0


def test_a_name_that_two_nodes_have_is_never_armed(page) -> None:
    node, _, client = page
    with open_graph("dds") as graph:
        graph.create_node("vla_policy")
        client.look(lambda view: view["namesakes"] == 2)
        client.hold("arm")
        client.answer("2 nodes are called /vla_policy")
    assert node.safety.armings == 0


def test_a_stop_reaches_every_node_and_a_page_shows_the_one_that_it_chose(robot, arm, inside, console) -> None:
    first = inside("control.armed:=false")
    apart = ("-r", "__node:=second", "-r", "/arm/joint_command:=/second/joint_command")
    second = inside("control.armed:=false", ros_args=("--ros-args", *apart))
    with console().connect() as socket:
        client = Client(socket)
        client.look(lambda view: len(view["nodes"]) == 2)
        socket.send(json.dumps({"seen": client.beat, "node": "/second"}))
        client.look(lambda view: view["name"] == "/second")
        client.hold("arm")
        client.look(lambda view: view["state"] == "holding")
        assert first.safety.state is State.DISARMED
        client.ask("stop")
        client.look(lambda view: [state for _, state, _ in view["nodes"]] == ["stopped"] * 2)
    assert [first.safety.state, second.safety.state] == [State.STOPPED] * 2


def flood(client: Client, messages: list[str]) -> None:
    for number in range(100_000):
        client.socket.send(messages[number % len(messages)])
        if number % 50 == 0:
            client.look()


def test_a_flood_ends_the_connection_and_a_stop_before_it_counts(page) -> None:
    node, served, client = page
    client.ask("stop")
    junk = ["{}", "[]", '{"do": "arm"}', "\x00", '{"seen": 3}', json.dumps({"do": "instruct", "text": "x" * 900})]
    with pytest.raises(ConnectionClosed):
        flood(client, junk)
    wait(lambda: node.safety.state is State.STOPPED)
    assert status_of(served, "/healthz") == 200
    with served.connect() as again:
        Client(again).look(lambda view: view["state"] == "stopped")
        again.send("x" * 10_000)
        with pytest.raises(ConnectionClosed):
            Client(again).look(lambda view: False)
    assert node.safety.armings == 0


@pytest.mark.parametrize("how", ["killed", "hung", "not read"])
def test_a_console_that_is_killed_hangs_or_is_not_read_changes_nothing_at_the_node(page, robot, how: str) -> None:
    node, served, client = page
    client.look(lambda view: view["images"])
    client.hold("arm")
    client.look(lambda view: view["state"] == "armed")
    if how == "killed":
        served.process.kill()
    elif how == "hung":
        os.kill(served.process.pid, signal.SIGSTOP)
    before, statuses = len(robot.commands), len(robot.statuses)
    try:
        robot.until(lambda: len(robot.commands) > before + 20 and len(robot.statuses) > statuses + 2, patience=60.0)
        assert node.safety.state in (State.ARMED, State.HOLDING)
        assert main(["stop", "--backend", "dds"]) == 0, "another way to stop is not kept waiting"
    finally:
        if how == "hung":
            os.kill(served.process.pid, signal.SIGCONT)
    if how == "not read":
        wait(lambda: "page 1 disconnected" in served.text)


def test_other_hosts_are_served_with_tls_only(robot, console, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vla_ros.cli", "console", "--backend", "dds", "--port", "0"]
    done = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "ssh -L" in done.stderr) == (1, True)
    for words in (["--tls-key", "k"], ["--tls-key", "k", "--tls-certificate", "c"]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "--tls-certificate" in done.stderr
        assert "Traceback" not in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["--port", str(taken.getsockname()[1])]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60, check=False)
    assert "choose another --port" in done.stderr


def test_with_tls_the_page_and_its_websocket_are_encrypted(robot, console, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except OSError:
        pytest.skip("openssl is not installed")
    served = console(
        "--host", "0.0.0.0", "--name", "localhost", "--tls-certificate", str(certificate), "--tls-key", str(key)
    )
    context = ssl.create_default_context(cafile=str(certificate))
    port = served.host.rpartition(":")[2]
    with urllib.request.urlopen(f"https://localhost:{port}/healthz", timeout=10, context=context) as answer:
        assert answer.status == 200
