"""The six commands of docs/finetune.md in a row, as a reader types them, on the simulated arm."""

import contextlib
import json
import math
import re
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 (loaded after Mesa's renderer, which brings another LLVM, it crashes the process)

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")
pytest.importorskip("mujoco", reason="the library mujoco is not installed (extra 'sim')")
pytest.importorskip("cyclonedds", reason="cyclonedds is not installed (extra 'dds')")
pytest.importorskip("mcap", reason="the library mcap is not installed (extra 'replay')")

from PIL import Image

from test.command import vla_ros
from tools import forks
from vla_ros.cli.main import main
from vla_ros.graph import open_graph
from vla_ros_lab.eval.command import private_graph

ROOT = Path(__file__).parents[2]
STAND_INS = {"DIR": "demo-pi", "SUITE": "table", "OUT": "better"}
SMALL = {
    "finetune": "--device cpu --steps 3 --batch 2 --workers 0 --hold-out 0.5",
    "eval": "--episodes 1 --max-steps 20",
    "run": "",
}
"""What is added, so that each command takes seconds."""
LEADER = "/leader/joint_states"
PERSONS = 30  # actions of the person in an episode


def commands() -> list[str]:
    """The block below the heading that promises six commands; one line has two."""
    page = (ROOT / "docs" / "finetune.md").read_text()
    [block] = re.findall(r"six commands\n\n```\w*\n(.*?)```", page, re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line) for line in block.splitlines()]
    assert len(lines) == 6
    return [command.strip() for line in lines for command in line.split(";")]


def told(command: str) -> list[str]:
    for name, stand_in in STAND_INS.items():
        command = re.sub(rf"\b{name}\b", stand_in, command)
    words = shlex.split(f"{command} {SMALL[command.split()[1]]}")
    assert words[0] == "vla-ros"
    return words[1:]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the robot's file; its graph is nobody else's."""
    options: dict[str, Any] = {}
    for name in ("demo", "demo_pi"):
        content = yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text())
        for group, own in content["/**"]["ros__parameters"].items():
            options[group] = options.get(group, {}) | own
    del options["policy"]  # the commands name the checkpoint
    options["takeover"] = {"input": "leader", "leader": LEADER}
    (tmp_path / "robot.yaml").write_text(yaml.safe_dump({"/**": {"ros__parameters": options}}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in private_graph({}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: list[str]) -> str:
    done = vla_ros(*words)
    assert "Warning" not in done.stdout + done.stderr
    assert "Failed to load" not in done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def started(words: list[str], log: Path) -> Any:
    process = forks.Fork(forks.vla_ros, words, log)
    try:
        yield process
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()


class Person:
    """Moves a leader arm with the arm, and a little on, and takes over once the policy moves the arm."""

    def __init__(self) -> None:
        self.graph = open_graph("dds")
        self.node = self.graph.create_node("person")
        make, qos = self.graph.message, self.graph.qos
        state, text = make("sensor_msgs/msg/JointState"), make("std_msgs/msg/String")
        self._leader = self.node.create_publisher(state, LEADER, qos("state_publisher"))
        self.node.create_subscription(state, "/joint_states", self._follow, qos("state"))
        self.node.create_subscription(text, "/vla_policy/status", self._hear, qos("instruction"))
        array = make("std_msgs/msg/Float64MultiArray")
        self.node.create_subscription(array, "/vla_policy/person_action", self._count, qos("command"))
        self._service = self.graph.service("std_srvs/srv/SetBool")
        self._takeover = self.node.create_client(self._service, "/vla_policy/takeover")
        self.status: dict[str, Any] = {}
        self.actions, self._ticks, self._asked, self._ended = 0, 0, 0, False
        self._thread = threading.Thread(target=lambda: self.graph.spin(lambda: self._ended, 0.02))
        self._thread.start()

    def _follow(self, message: Any) -> None:
        self._ticks += 1
        positions = list(message.position)
        positions[0] += 0.03 * math.sin(0.1 * self._ticks)
        message.position = positions
        self._leader.publish(message)

    def _hear(self, message: Any) -> None:
        self.status = json.loads(message.data)
        if self.status["source"] == "policy" and not self._asked:
            self._ask(True)
        elif self.actions >= PERSONS and self._asked == 1:
            self._ask(False)

    def _ask(self, wanted: bool) -> None:
        self._asked += 1
        self._takeover.call_async(self._service.Request(data=wanted))

    def _count(self, message: Any) -> None:
        self.actions += 1

    def close(self) -> None:
        self._ended = True
        self._thread.join(10)
        self.graph.close()


def test_from_a_recording_to_a_checkpoint_that_runs(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forks.preload(*forks.TRAINING)
    record, check, train, old, new, judge, deploy = map(told, commands())
    demo = ["demo", "--attach", "--real-time", "--config", "robot.yaml"]
    with started(record, desk / "run.log"), contextlib.closing(Person()) as person:
        played = run([*demo, "--checkpoint", "demo-pi", "--episodes", "2", "--max-steps", "80"])
        assert person.actions >= PERSONS, f"{played}\n{person.status}\n{(desk / 'run.log').read_text()}"
    run(train)
    for words in ([*check, "--json", "check.json"], old, new, judge):
        assert main(words) == 0
    printed = capsys.readouterr().out
    assert json.loads((desk / "check.json").read_text())["summary"]["corrections"] == 1
    assert "of them corrections" in printed
    assert "in closed loop" in printed
    evidence = json.loads((desk / "better" / "evidence" / "evidence.json").read_text())
    assert evidence["proof"]["basis"] == "closed_loop"
    with started(deploy, desk / "deploy.log"):
        run([*demo, "--checkpoint", "better", "--episodes", "1", "--max-steps", "20"])
    Image.fromarray(np.full((480, 640, 3), 90, np.uint8)).save("front.png")
    asked = "infer --config robot.yaml --checkpoint better/adapter --image front.png --json a.json --instruction go"
    assert main([*asked.split(), "--state", "0,0.4,0,1.5,0,0.7,0,0.5"]) == 0
    assert np.isfinite(json.loads((desk / "a.json").read_text())["actions"]).all()
