"""Fuzz the commands with damaged files, each in a process of its own: ``python fuzz/commands.py --count 300``.

A command may accept a file or refuse it with one message that names the file; it ends within twice the processor
time of the sound file and uses at most 2 GB. A traceback, a hang, another status or an unnamed file is a failure,
which is printed with its number: the same seed makes the same files.
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run import damage

ROOT = Path(__file__).resolve().parents[1]
_BYTES = 2 << 30  # of resident memory
_SLACK = 1.0  # s beyond twice the sound file's time, which is a few tenths of a second for small files
_HANG = 60.0  # s of the wall clock, also on a busy machine
_LARGEST = 1 << 20  # bytes of a file whose bytes are damaged; weights are cut or replaced
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 0.5, -1e-9, 1_000_000, 1 << 31, 1 << 62, 1e308, float("inf"), float("nan")),
    *(
        "",
        "x",
        "false",
        "../..",
        "/dev/zero",
        "a" * 5000,
        "\x1b[31m",
        [],
        {},
        [None],
        [[[]]],
        {"": {}},
        [0] * 10_000,
    ),
)
_TEXTS = (
    b"[" * 100_000,
    b"\0" * 1000,
    b"\xff\xfe",
    b"{}",
    b"[]",
    b"null",
    b"version https://git-lfs.github.com/spec/v1\n",
)


_OPTION = re.compile(r"vla-ros run: [a-z]+\.\w+( and [a-z]+\.\w+)?: ")  # names the option of a parameter file


@dataclass(frozen=True)
class Kind:
    """A kind of input: where its sound files are, and the command that reads a copy of them."""

    source: Path  # a file or folder
    command: Callable[[Path], Sequence[object]]
    sound: float = 0.0  # s of processor time that the command takes with the sound files


def kinds(folder: Path) -> dict[str, Kind]:
    """Return every kind of input; ``folder`` gets further files that the commands need."""
    result = folder / "result.json"
    image = folder / "sound.png"
    if not image.exists():
        import numpy as np
        from PIL import Image

        Image.fromarray(np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)).save(image)
    bags, policies = ROOT / "test/data/bags", ROOT / "src/vla_ros_models"
    hold = ("--config", "demo", "-p", "policy.name:=hold")
    wiggle = ("run", "--dry-run", "-p", "policy.name:=wiggle")
    asked = ("--instruction", "put the red cup on the blue plate", "-p", "policy.threads:=1")
    key = ("-p", "policy.unnorm_key:=table_10hz")

    def infer(*more: object) -> Callable[[Path], Sequence[object]]:
        return lambda path: ("infer", "--checkpoint", path, "--image", image, *asked, *more)

    def replay(path: Path) -> Sequence[object]:
        return ("replay", path, *hold, "--no-trials", "--limit", "5")

    return {
        "openvla": Kind(policies / "openvla/demo_checkpoint", infer(*key)),
        "pi": Kind(policies / "pi/demo_checkpoint", infer("--config", "demo_pi", "--state", "0,0,0,0,0,0,0,0")),
        "bag": Kind(bags / "demo_jpeg", replay),
        "bag_zstd": Kind(bags / "mcap_zstd_file", replay),
        "bag_sqlite": Kind(bags / "sqlite3_zstd_message", replay),
        "urdf": Kind(
            ROOT / "src/vla_ros/kinematics/demo_arm.urdf",
            lambda path: (*wiggle, "-p", "gripper.mode:=none", "-p", f"robot.urdf:={path}"),
        ),
        "yaml": Kind(ROOT / "config/demo.yaml", lambda path: (*wiggle, "--config", path)),
        "robot": Kind(ROOT / "config/robots/ur5e.yaml", lambda path: (*wiggle, "--config", path)),
        "result": Kind(result, lambda path: ("compare", result, path)),
        "image": Kind(
            image,
            lambda path: (
                "infer",
                "--checkpoint",
                "demo",
                *asked,
                "-p",
                "policy.unnorm_key:=table_10hz",
                "--image",
                path,
            ),
        ),
    }


# Damage


def mutate(path: Path, rng: random.Random) -> Path:
    """Damage one file of the copy at ``path`` and return the file."""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix != ".md")
    small = [each for each in files if each.suffix in (".json", ".yaml", ".urdf", ".png")]
    file = rng.choice(small if small and rng.random() < 0.8 else files)
    if rng.random() < 0.12:
        _replace(file, rng)
    elif file.suffix == ".json" and rng.random() < 0.75:
        _edit_json(file, rng)
    elif file.suffix in (".yaml", ".urdf") and rng.random() < 0.6:
        _edit_lines(file, rng)
    else:
        data = file.read_bytes()
        if len(data) > _LARGEST:
            at = rng.choice((0, 8, rng.randrange(len(data))))
            data = data[:at] if rng.random() < 0.5 else data[:at] + rng.randbytes(64) + data[at + 64 :]
        else:
            data = damage(data, data, rng)
        file.write_bytes(data)
    return file


def _replace(file: Path, rng: random.Random) -> None:
    """Put something else in the file's place: nothing, a folder, a pipe, a device, a loop, or other content."""
    kind = rng.randrange(6)
    if kind == 5:
        file.write_bytes(rng.choice(_TEXTS))
        return
    file.unlink()
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        os.mkfifo(file)
    elif kind in (3, 4):
        file.symlink_to("/dev/zero" if kind == 3 else file)


def _edit_json(file: Path, rng: random.Random) -> None:
    """Replace, remove or repeat one entry, or its name."""
    content = json.loads(file.read_text())
    parents = [each for each in _containers(content) if each]
    at = rng.choice(parents)
    key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
    choice = rng.random()
    if choice < 0.1:
        del at[key]
    elif choice < 0.2 and isinstance(at, dict):
        at[f"{key}_"] = at.pop(key)
    elif choice < 0.3 and isinstance(at, list):
        at.extend([at[key]] * rng.choice((1, 1000)))
    elif choice < 0.4 and isinstance(at[key], int | float):
        at[key] = rng.choice((-at[key], at[key] * 1000, at[key] + 1, str(at[key]), [at[key]]))
    else:
        at[key] = rng.choice(_VALUES)
    text = json.dumps(content)
    if rng.random() < 0.1:
        text = text.replace(f'"{key}":', f'"{key}": null, "{key}":', 1)
    file.write_text(text)


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each)


def _edit_lines(file: Path, rng: random.Random) -> None:
    """Repeat, remove, move or indent a line, or replace a number or word of it."""
    lines = file.read_text().splitlines(keepends=True)
    at, choice = rng.randrange(len(lines)), rng.randrange(6)
    if choice == 0:
        del lines[at]
    elif choice == 1:
        lines[at:at] = [lines[at]] * rng.choice((1, 2, 5000))
    elif choice == 2:
        lines[at], other = lines[rng.randrange(len(lines))], lines[at]
        lines.append(other)
    elif choice == 3:
        lines[at] = " " * rng.randrange(1, 5) + lines[at]
    else:
        words = lines[at].split(" ")
        word = rng.randrange(len(words))
        value = rng.choice(_VALUES)
        words[word] = value if isinstance(value, str) else json.dumps(value)
        lines[at] = " ".join(words)
    file.write_text("".join(lines))


# Commands


@dataclass(frozen=True)
class End:
    """How a command ended."""

    status: int  # as a shell shows it; -1: it was still running
    seconds: float  # of processor time, so that other load does not count
    peak: int  # bytes of resident memory
    output: str


def preload() -> None:
    """Import what the commands need, so that each forked child begins at once."""
    import importlib

    for name in ("torch", "pinocchio", "tokenizers", "rosbags", "mcap.reader", "cv2"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in (
        "vla_ros.node.run",
        "vla_ros.node.infer",
        "vla_ros_models.openvla.policy",
        "vla_ros_models.pi.policy",
        "vla_ros_lab.replay.evaluate",
    ):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


def run(words: Sequence[object], seconds: float) -> End:
    """Run ``vla-ros WORDS`` in a forked child for at most ``seconds``."""
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        child = os.fork()
        if not child:
            _command([str(word) for word in words], output.fileno())
        status, usage = None, None
        while status is None and time.monotonic() - began < seconds:
            done, found, usage = os.wait4(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(found) if done else None
            time.sleep(0.0 if done else 0.01)
        if status is None:
            os.killpg(child, signal.SIGKILL)
            _, _, usage = os.wait4(child, 0)
        assert usage is not None
        output.seek(0)
        text = output.read(1 << 20).decode(errors="replace")
        spent = usage.ru_utime + usage.ru_stime
        return End(-1 if status is None else status, spent, usage.ru_maxrss << 10, text)


def _command(words: list[str], output: int) -> None:
    """Run the command in this process, and end it."""
    status = 99
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # the machine's, not the limit that is judged
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from vla_ros.cli.main import main

        status = main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 2
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)


def judge(end: End, kind: Kind, path: Path, file: Path) -> str:
    """Return what is wrong with a command's end, or ""."""
    if "Traceback (most recent call last)" in end.output:
        return "traceback"
    if end.status == -1:
        return f"still running after {_HANG:g} s"
    if end.seconds > 2 * kind.sound + _SLACK:
        return f"{end.seconds:.1f} s, the sound file takes {kind.sound:.1f} s"
    if end.peak > _BYTES:
        return f"{end.peak / 2**30:.1f} GB"
    if end.status not in (0, 1, 2):
        return f"status {end.status}"
    named = any(name in end.output for name in (file.name, path.name))
    if end.status and not named and not (file.suffix == ".yaml" and _OPTION.search(end.output)):
        return "the error does not name the file"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="*", help="default: all")
    parser.add_argument("--count", type=int, default=300, help="damaged files in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one number of the seed, with the command's output")
    given = parser.parse_args()
    preload()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fuzz_commands_") as name:
        folder = Path(name)
        known = kinds(folder)
        run((*known["bag"].command(known["bag"].source), "--json", folder / "result.json"), 120)
        chosen: dict[str, Kind] = {}
        for each in given.kind or known:
            kind = known[each]
            run(kind.command(kind.source), 120)  # what is only imported then is not timed
            sound = run(kind.command(kind.source), 120)
            if sound.status:
                print(f"{each}: the sound file ends with {sound.status}: {sound.output[-2000:]}")
                return 1
            chosen[each] = Kind(kind.source, kind.command, sound.seconds)
            print(f"{each:<12} sound: {sound.seconds:.1f} s, {sound.peak / 2**30:.2f} GB", flush=True)
        accepted = refused = 0
        for number in range(given.count):
            each = list(chosen)[number % len(chosen)]
            if given.only not in (None, number):
                continue
            kind, rng, path = chosen[each], random.Random(f"{given.seed} {number}"), folder / f"{each}_{number}"
            path = path.with_suffix(kind.source.suffix)
            (shutil.copytree if kind.source.is_dir() else shutil.copyfile)(kind.source, path)
            file = mutate(path, rng)
            end = run(kind.command(path), _HANG)
            accepted, refused = accepted + (not end.status), refused + bool(end.status)
            if wrong := judge(end, kind, path, file):
                last = (end.output.strip().splitlines() or [""])[-1][:200]
                failures.append(f"{number} {each} {file.name}: {wrong}: {last}")
                print(failures[-1], flush=True)
            if given.only is not None:
                print(end.output, end)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    print(f"{accepted} accepted, {refused} refused, {len(failures)} failed; seed {given.seed}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
