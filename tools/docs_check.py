"""Runs the commands of README.md and docs/ that need no robot, as the pages write them.

    python -m tools.docs_check            # all that is not skipped; minutes
    python -m tools.docs_check --list     # what is run, what is not, and why

Every fenced block marked ``sh`` is read. A block runs in a fresh folder with links to the repository's folders and
with the files that a user would have (``my_robot.yaml``, a photo, a bag, ...). ``vla-ros run`` ends with SIGINT
once it is ready; ``vla-ros serve`` serves the rest of its block. Each command must end with status 0.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools import forks
from tools.robots.descriptions import ROBOTS, urdf
from vla_ros_lab.eval.command import private_graph

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {
    r"^ros2 |^colcon |^rosdep |/opt/ros/|benchmarks/middleware\.py": "needs ROS 2; see test/ros",
    r"^sudo |KEYSTORE": "needs root, or what root installs",
    r"git clone |^(~/lerobot/bin/|env -u PYTHONPATH |\w+=\S+ )?pip |-m venv|^c?make ": "installs packages",
    r"libero/bin/python|--compare sync\.json|preset:=libero|libero\.yaml": "needs LIBERO, and a checkpoint for it",
    r"tools\.train|work/|^for part|^vla-ros export bags|^lerobot-train": "trains for hours",
    r"run/checkpoints|config/demo_lerobot\.yaml|benchmarks/schedules\.py": "takes hours",
    r"benchmarks/shards\.py": "needs a large GPU",
    r"my_act": "needs a LeRobot checkpoint and its environment",
    r"^serve run ": "needs Ray Serve and GPUs",
    r"^ssh ": "needs another machine",
    r"^vla-ros (top|teach|console)\b": "needs a running node; see test/cli",
    r"^vla-ros (init|commission)\b|my_measured": "needs an arm; see test/cli and test/commission",
    r" \.\.\.$": "is an outline",
}
"""Why a command is not run, by a pattern of its text."""
SLOW = r"^vla-ros (demo|eval|serve|export|replay)|policy\.checkpoint"
"""Commands whose blocks do not run in the test suite."""
STAND_INS = {
    "--checkpoint DIR": "--checkpoint demo -p policy.unnorm_key:=table_10hz",
    "/models/openvla-7b": "demo",
    "bridge_orig": "table_10hz",
    "BAG...": "my_bag",
    "BAGS": "my_bag",
    "~/my_pi05": "demo-pi",
    "frontend_key": "key",
    "my_leader.yaml": "pad",
    "first.json second.json": "result.json result.json",
    "--host 0.0.0.0": "--host 127.0.0.1",
    "ws://gpu:": "ws://127.0.0.1:",
    "--episodes 50": "--episodes 2",
    "--episodes 400": "--episodes 1",
    "--steps 400 --batch 32": "--steps 2 --batch 2",
}
"""What a page leaves to the reader, or what takes hours, and what stands in for it here."""
PATIENCE = 600.0
_OF_SHELL = r"[|&;<>$`*?~{}()\\\n]"
"""What only a shell understands; a command without it is forked from a process that has imported its modules."""
READY = {"run": "is ready", "serve": "serving"}


@dataclass(frozen=True)
class Block:
    """The commands of one fenced block; ``reasons`` says for each why it is skipped, or ""."""

    page: str
    line: int
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(command for command in self.commands if not reason(command))

    @property
    def is_slow(self) -> bool:
        return any(re.search(SLOW, command) for command in self.runs)


def reason(command: str) -> str:
    """Return why a command is not run, or ""."""
    return next((why for pattern, why in SKIPPED.items() if re.search(pattern, command)), "")


def blocks() -> Iterator[Block]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, found.start()) + 2
            yield Block(str(page.relative_to(ROOT)), line, tuple(_commands(found[1])))


def _commands(text: str) -> Iterator[str]:
    """Yield the commands of a block; a loop is one, and so is a line that a backslash continues."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    while lines:
        command = re.sub(r"(^|\s+)#\s.*", "", lines.pop(0)).strip()
        while command.startswith("for ") and lines and not command.endswith("done"):
            command += "\n" + lines.pop(0)
        if command:
            yield command


def run_block(block: Block) -> None:
    """Run the commands of a block; raises AssertionError with the output of one that fails."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _furnish(folder, block.page)
        environment = _environment(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        servers: list[forks.Fork] = []
        stack.callback(_end_all, servers)
        for command in block.runs:
            for text, stand_in in {**STAND_INS, "8000": port}.items():
                command = command.replace(text, stand_in)
            _run(block, _described(command, folder), environment, servers)


def _furnish(folder: Path, page: str) -> None:
    """Put the files into ``folder`` that a reader of the page has."""
    for name in ("benchmarks", "config", "docs", "launch", "src", "test", "tools"):
        (folder / name).symlink_to(ROOT / name)
    bag = next((ROOT / "test/data/bags/demo_jpeg").glob("*.mcap"))
    for name in ("my_bag", "disarmed", "recordings"):
        shutil.copytree(bag.parent, folder / name)
    robot = yaml.safe_load((ROOT / "config/demo.yaml").read_text())
    (folder / "robot.yaml").write_text(yaml.safe_dump(robot))
    policy = robot["/**"]["ros__parameters"]["policy"]
    (folder / "my_policy.yaml").write_text(yaml.safe_dump({"/**": {"ros__parameters": {"policy": policy}}}))
    if page.startswith("docs/robots/"):  # the robot's file has a policy for tests, which the next file replaces
        robot["/**"]["ros__parameters"]["policy"] = {"name": "wiggle"}
    (folder / "my_robot.yaml").write_text(yaml.safe_dump(robot))
    (folder / "key").write_text("a-key-of-sixteen-characters\n")
    (folder / "key").chmod(0o600)
    from PIL import Image

    Image.new("RGB", (224, 224), (90, 120, 60)).save(folder / "photo.png")


def _described(command: str, folder: Path) -> str:
    """Write the URDF that the command names, with the frames that it names; otherwise add the tip's name."""
    found = re.search(r"--config (\w+) .*robot\.urdf:=(\S+\.urdf)", command)
    if found is None:
        return command
    robot, text = ROBOTS[found[1]], urdf(found[1], own=True)
    for option, link in (("base_frame", robot.base), ("tip_frame", robot.tip)):
        named = re.search(rf"robot\.{option}:=(\S+)", command)
        text = text.replace(f'"{link}"', f'"{named[1]}"') if named else text
    (folder / found[2]).write_text(text)
    return command if "robot.tip_frame" in command else f"{command} -p robot.tip_frame:={robot.tip}"


def _run(block: Block, command: str, environment: dict[str, str], servers: list[forks.Fork]) -> None:
    verb = command.split()[1] if command.startswith("vla-ros ") else ""
    ready = "" if "--dry-run" in command else READY.get(verb, "")
    if verb == "serve":
        _end_all(servers)
    folder = Path(environment["HOME"])
    log = folder / f"{verb or 'output'}.log"
    plain = bool(verb) and not re.search(_OF_SHELL, command)
    words = shlex.split(command)[1:] if plain else [f"exec {command}" if ready else command]
    process = forks.Fork(forks.vla_ros if plain else forks.shell, words, log, None, environment, folder)
    servers.append(process)
    deadline = time.monotonic() + PATIENCE
    while ready and process.poll() is None and ready not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, f"{block}: {command}\nnot ready after {PATIENCE:g} s"
        time.sleep(0.05)
    if verb == "serve" and process.poll() is None:
        return
    if ready:
        process.send_signal(signal.SIGINT)
    try:
        status = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{block}: {command}\nnot ended after {PATIENCE:g} s") from None
    servers.remove(process)
    text = log.read_text(errors="replace")
    assert status == 0, f"{block}: {command}\nended with status {status}:\n{text[-3000:]}"


def _environment(folder: Path) -> dict[str, str]:
    """A user's shell: the commands of this environment, a home of its own, a graph that nobody else uses."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | private_graph({}) | {"PATH": path, "HOME": str(folder)}


def _end_all(processes: list[forks.Fork]) -> None:
    for process in processes:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    processes.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the commands, run nothing")
    parser.add_argument("pages", nargs="*", help="only these pages, such as docs/replay.md")
    arguments = parser.parse_args()
    failed = 0
    for block in blocks():
        if arguments.pages and block.page not in arguments.pages:
            continue
        if arguments.list:
            speed = "make docs-check" if block.is_slow else "in the suite"
            for command in block.commands:
                print(f"{block}: {reason(command) or speed}: {command.splitlines()[0]:.90}")
        elif block.runs:
            started = time.monotonic()
            try:
                run_block(block)
            except AssertionError as error:
                failed += 1
                print(error, flush=True)
            else:
                print(f"{block}: {len(block.runs)} command(s), {time.monotonic() - started:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
