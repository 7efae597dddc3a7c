"""Training on bad data, on a full disk, and until Ctrl+C: a clear message, and no half checkpoint that loads."""

import json
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

from test.training.test_check import ONE
from test.training.test_reading import tiny_set
from tools import forks
from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import create
from vla_ros_models.checkpoint_files import checkpoint_folder

OPTIONS = [word for option in ONE for word in ("-p", option)]
STEPS = 25


def command(data: Path, output: Path, *more: str) -> list[str]:
    start = ["finetune", str(data), "--checkpoint", "demo-pi", "--config", "demo", "--config", "demo_pi", *OPTIONS]
    quick = ["--batch", "2", "--workers", "0", "--device", "cpu", "--save-every", "1"]
    return [*start, "--output", str(output), *quick, *more]


def forked(words: list[str], tmp_path: Path) -> tuple[forks.Fork, Path]:
    """Start the command; return its process, and what it says on standard error."""
    forks.preload(*forks.TRAINING)
    told = tmp_path / "told"
    return forks.Fork(forks.vla_ros, words, tmp_path / "printed", told), told


def still(tmp_path: Path, *lengths: int) -> Path:
    """A data set in which nothing moves."""
    pose = [[0.1] * 8] * sum(lengths)
    return tiny_set(tmp_path / "set", [*lengths], **{"observation.state": pose, "action": pose})


def require_no_checkpoint(output: Path) -> None:
    with pytest.raises(VlaRosError):
        create_from(output)


def create_from(output: Path) -> None:
    create(load([], [f"policy.checkpoint:={output}"])).describe()


@pytest.mark.parametrize("statistics", ["checkpoint", "data"])
@pytest.mark.parametrize("lengths", [(1,), (6, 5)])
def test_one_frame_and_one_pose_train_and_are_named(
    tmp_path: Path, lengths: tuple[int, ...], statistics: str, capsys: Any
) -> None:
    """Numbers that never change have no spread to divide by."""
    words = ("--steps", "2", "--statistics", statistics, "--hold-out", "0", "--json", str(tmp_path / "f.json"))
    assert main(command(still(tmp_path, *lengths), tmp_path / "out", *words)) == 0
    assert np.isfinite(json.loads((tmp_path / "f.json").read_text())["losses"]).all()
    printed = capsys.readouterr().out
    assert ("1 frame in all" if lengths == (1,) else "neither the arm nor an action moves") in printed
    create_from(tmp_path / "out")


def test_bad_data_leave_nothing(tmp_path: Path, capsys: Any) -> None:
    other = tiny_set(tmp_path / "six", [5], **{"observation.state": [[0.1] * 8] * 5, "action": [[0.1] * 6] * 5})
    empty = tiny_set(tmp_path / "nan", [5], **{"observation.state": [[0.1] * 8] * 5, "action": [[np.nan] * 8] * 5})
    for data, message in ((other, "6 numbers"), (empty, "NaN")):
        assert main(command(data, tmp_path / "out")) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_full_disk_ends_with_a_message_and_the_run_resumes(tmp_path: Path) -> None:
    """Files end at 100 kB, as on a disk that is full: the state does not fit."""
    words = command(still(tmp_path, 9, 9), tmp_path / "out", "--steps", "2", "--hold-out", "0")
    process, told = forked(words, tmp_path)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    assert process.wait(240) == 1
    assert "could not be written" in told.read_text()
    assert "free some space" in told.read_text()
    assert "Traceback" not in told.read_text()
    assert not list((tmp_path / "out").glob("*.safetensors"))
    require_no_checkpoint(tmp_path / "out")
    assert main(words) == 0
    create_from(tmp_path / "out")


def test_ctrl_c_ends_with_a_message_and_the_run_resumes(tmp_path: Path, capsys: Any) -> None:
    words = command(still(tmp_path, 9, 9), tmp_path / "out", "--steps", str(STEPS), "--hold-out", "0")
    process, told = forked(words, tmp_path)
    deadline = time.monotonic() + 200
    while process.poll() is None and not list((tmp_path / "out").glob("run/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 1
    assert "the same command resumes there" in told.read_text()
    assert "Traceback" not in told.read_text()
    require_no_checkpoint(tmp_path / "out")
    assert main([*words, "--json", str(tmp_path / "f.json")]) == 0
    assert "resumes after step" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "f.json").read_text())["losses"]) == STEPS
    assert (checkpoint_folder(str(tmp_path / "out")) / "config.json").exists()
