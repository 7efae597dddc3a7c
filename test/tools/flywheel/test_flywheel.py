"""The loop at its smallest: a policy that knows nothing, a person who corrects it, a training that continues."""

import argparse
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 (loaded after Mesa's renderer, which brings another LLVM, it crashes the process)

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

from tools.flywheel.__main__ import TRAININGS, Flywheel, Job
from tools.flywheel.collect import EXPERT, collect
from tools.geometry import CHUNKS
from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import create
from vla_ros_lab.training.reading import open_samples


def test_a_person_corrects_and_the_command_trains_on_it(tmp_path: Path) -> None:
    """The demo's policy of chunks, with a camera that was moved far away: it fails, and a person corrects."""
    [outcome] = collect("corrected", "demo-pi", tmp_path / "bags", 1, 3_000_000, 1, "--camera-turn 60")
    assert outcome["takeovers"]
    assert collect("corrected", "nowhere", tmp_path / "bags", 1, 3_000_000, 1) == [outcome]
    config = load(
        [config_file("demo"), config_file("demo_pi")], ["policy.checkpoint:=demo-pi", "policy.device:=cpu"]
    )
    policy = create(config)
    samples = open_samples([tmp_path / "bags"], policy.describe(), config)
    assert 0 < len(samples) < outcome["steps"], "only what the person did is trained on"
    assert all(one.corrected for one in samples.data)
    actions = np.concatenate([one.actions for one in samples.data])
    states = np.concatenate([one.state["state"] for one in samples.data])
    assert np.abs(actions[:, :7] - states[:, :7]).max() < 0.5, "positions of the joints"
    assert set(actions[:, 7]) == {0.0, 1.0}, "opens the hand, and closes it on the object"
    words = [
        "finetune",
        str(tmp_path / "bags"),
        "--checkpoint",
        "demo-pi",
        "--config",
        "demo",
        "--config",
        "demo_pi",
    ]
    words += ["--output", str(tmp_path / "out"), *map(str, TRAININGS["lora"]), "--steps", "1", "--batch", "2"]
    words += ["--workers", "0", "--device", "cpu", "-p", "policy.device:=cpu", "-p", "policy.self_test:=false"]
    assert main(words) == 0
    assert (tmp_path / "out" / "evidence" / "evidence.json").exists()


def test_a_demonstration_of_the_expert_moves_at_the_pace_of_its_plan(tmp_path: Path) -> None:
    """The farthest that eight commands in turn move a joint: as far where the expert decides at each step."""
    config = load(
        [config_file("demo"), config_file("demo_pi")], ["policy.checkpoint:=demo-pi", "policy.device:=cpu"]
    )
    spec, farthest = create(config).describe(), {}
    for name, how in (("parts", CHUNKS), ("steps", "-p control.rate_hz:=20.0")):
        bags = tmp_path / name
        [outcome] = collect("autonomous", EXPERT, bags, 1, 2_000_000, 1, f"--camera-turn 10 {how}")
        assert outcome["success"]
        assert not outcome["takeovers"]
        samples = open_samples([bags], spec, config)
        assert len(samples) >= outcome["steps"] - 1, "all of it is trained on"
        actions = np.concatenate([one.actions for one in samples.data])
        farthest[name] = np.abs(actions[8:, :7] - actions[:-8, :7]).max()
        assert set(actions[:, 7]) == {0.0, 1.0}
    assert farthest["steps"] > 0.85 * farthest["parts"]


def test_the_command_resumes_where_it_failed(tmp_path: Path) -> None:
    given = argparse.Namespace(folder=tmp_path)
    wrong, right = (tmp_path / name for name in ("wrong.json", "right.json"))
    right.write_text("1")
    wrong.write_text("{")
    made = [tmp_path / name for name in ("first.json", "second.json", "third.json")]
    jobs = [
        Job(("json.tool", str(file), str(out)), out) for file, out in zip((right, wrong, right), made, strict=True)
    ]
    with pytest.raises(VlaRosError, match="logs/second: failed with status 1"):
        Flywheel(given).do(jobs)
    assert [path.exists() for path in made] == [True, False, False]
    assert "Expecting property name" in (tmp_path / "logs/second").read_text()
    wrong.write_text("2")
    right.write_text("3")
    Flywheel(given).do(jobs)
    assert [path.read_text().strip() for path in made] == ["1", "2", "3"], "what was complete is not made again"


def test_the_table_has_the_paired_differences(tmp_path: Path) -> None:
    given = argparse.Namespace(folder=tmp_path)
    wins = {"weak": 3, "lora": 7, "full": 9}
    (tmp_path / "verdicts").mkdir()
    (tmp_path / "scores").mkdir()
    for kind in ("corrected", "autonomous"):
        (tmp_path / kind).mkdir()
        journal = [{"seed": 1, "kept": True, "success": True, "steps": 9, "takeovers": 1}]
        (tmp_path / kind / "episodes.json").write_text(json.dumps(journal))
    for name, won in wins.items():
        (tmp_path / "verdicts" / f"{name}.json").write_text('{"verdict": "better"}')
        for place, lost in (("new", 0), ("known", 1)):
            episodes = [{"episode_id": seed, "metrics": {"success": lost <= seed < won}} for seed in range(10)]
            content = {"tasks": [{"task": "table", "episodes": episodes}]}
            (tmp_path / "scores" / f"{place}-{name}.json").write_text(json.dumps(content))
    facts = Flywheel(given)._table()
    assert facts["verdicts"] == {"lora": "better", "full": "better"}
    assert facts["episodes"]["corrected"] == {"kept": 1, "success": 1, "takeovers": 1, "recorded": 1}
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[2].startswith("| new | lora | 30.0% | 70.0% | +40.0, ")
    assert lines[5].startswith("| known | full | 20.0% | 80.0% | +60.0, ")
