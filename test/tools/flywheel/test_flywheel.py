"""The loop at its smallest: a policy that knows nothing, a person who corrects it, a training that continues."""

import argparse
import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 (loaded after Mesa's renderer, which brings another LLVM, it crashes the process)

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("av")
pq = pytest.importorskip("pyarrow.parquet")

import torch  # noqa: E402

from tools.flywheel import lerobot  # noqa: E402
from tools.flywheel.__main__ import Flywheel, Job  # noqa: E402
from tools.flywheel.collect import collect  # noqa: E402
from tools.flywheel.table import compare, markdown  # noqa: E402
from tools.train import data, shards  # noqa: E402
from tools.train.export import export  # noqa: E402
from tools.train.fit import Run  # noqa: E402
from tools.train.loop import RECIPE, STATISTICS  # noqa: E402
from tools.train.recipe import DataRecipe, FitOptions, FitRecipe, LabelRecipe, NetworkRecipe  # noqa: E402
from vla_ros.cli.main import main  # noqa: E402
from vla_ros.errors import VlaRosError  # noqa: E402
from vla_ros_lab.sim.expert import MAX_STEP  # noqa: E402

SMALL = NetworkRecipe(
    vision_width=32, vision_blocks=1, vision_heads=2, llm_width=48, llm_layers=2, llm_heads=3, llm_hidden=64
)
FORM = ("--config", "demo", "--action", "arm.tip_delta + arm.gripper", "--clock", "frames", "--fps", "10")


def fit(folder: Path, frames: Path, steps: int) -> Run:
    torch.set_num_threads(1)
    recipe = FitRecipe(steps=steps, batch=2, prompts=1, warmup=1, location_weight=0.0, kind_weight=0.0)
    run = Run(folder, frames, SMALL, LabelRecipe(), recipe, FitOptions(device="cpu"))
    run.train(run.load())
    return run


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flywheel")
    recipe = DataRecipe(episodes=2, objects=1, max_steps=4, switch_share=0.0, shard_episodes=2)
    data.generate(folder / "weak-data", recipe, processes=1)
    fit(folder / "weak", folder / "weak-data", 1)
    export(folder / "weak", folder / "weak" / "checkpoint")
    return folder


def test_a_person_corrects_and_the_training_continues_with_the_corrections(weak: Path) -> None:
    [outcome] = collect("corrected", weak / "weak" / "checkpoint", weak / "bags", 1, 3_000_000, 1)
    assert outcome["success"]
    assert outcome["takeovers"]
    assert collect("corrected", weak / "nowhere", weak / "bags", 1, 3_000_000, 1) == [outcome]

    assert main(["export", str(weak / "bags"), "--output", str(weak / "set"), *FORM]) == 0
    table = pq.read_table(weak / "set/data/chunk-000/file-000.parquet")
    by_person = np.array(table["intervention"].to_pylist())
    assert 0 < by_person.sum() < len(by_person) == outcome["steps"]
    actions = np.array(table["action"].to_pylist())[by_person]
    assert np.linalg.norm(actions[:, :3], axis=1).max() == pytest.approx(MAX_STEP, rel=0.25), "as the expert moves"
    assert {actions[0, 6], actions[-1, 6]} == {1.0, 0.0}, "opens the hand, and closes it on the object"

    old, used = lerobot.add(weak / "set", weak / "weak-data", weak / "more-data")
    assert (old, used) == (8, by_person.sum())
    found = shards.read_labels(data.shard_paths(weak / "more-data"))
    np.testing.assert_allclose(found.actions[old:, 0, 0, :6], actions[:, :6], atol=1e-6)
    lerobot.begin_from(weak / "weak" / "checkpoint", weak / "same")
    shutil.copy(weak / "weak" / RECIPE, weak / "same")
    export(weak / "same", weak / "same" / "checkpoint")
    files = [sorted((weak / name / "checkpoint").glob("*.safetensors")) for name in ("weak", "same")]
    one, same = ([path.read_bytes() for path in each] for each in files)
    assert one == same, "a checkpoint's weights are where the training begins"
    lerobot.begin_from(weak / "weak", weak / "more")
    run = fit(weak / "more", weak / "more-data", 3)
    assert run.step == 3
    texts = [(weak / name / STATISTICS).read_text() for name in ("weak", "more")]
    assert texts[0] == texts[1], "tokens keep their meaning"
    lines = (weak / "more" / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 3, "it began with the weak policy's step"


def test_the_command_resumes_where_it_failed(tmp_path: Path) -> None:
    given = argparse.Namespace(folder=tmp_path, gpus=[])
    wrong, right = (tmp_path / name for name in ("wrong.json", "right.json"))
    right.write_text("1")
    wrong.write_text("{")
    made = [tmp_path / name for name in ("first.json", "second.json", "third.json")]
    jobs = [
        Job(("json.tool", str(file), str(out)), out) for file, out in zip((right, wrong, right), made, strict=True)
    ]
    with pytest.raises(VlaRosError, match="logs/second: failed with status 1"):
        Flywheel(given).do([jobs])
    assert [path.exists() for path in made] == [True, False, False]
    assert "Expecting property name" in (tmp_path / "logs/second").read_text()
    wrong.write_text("2")
    right.write_text("3")
    Flywheel(given).do([jobs])
    assert [path.read_text().strip() for path in made] == ["1", "2", "3"], "what was complete is not made again"


def test_the_table_compares_pairs() -> None:
    weak = {seed: seed < 6 for seed in range(10)}
    better = {seed: seed != 0 for seed in range(10)}
    row = compare(weak, better)
    assert (row["only_weak"], row["only_this"], row["successes"]) == (1, 4, 9)
    assert row["points"] == pytest.approx(30)
    low, high = row["points_interval"]
    assert low < 30 < high
    assert row["p"] == pytest.approx(0.375)
    lines = markdown({"weak": compare(weak, weak), "better": row}).splitlines()
    assert lines[3].startswith("| better | 9 of 10, 90.0 % |")
    assert "+30.0" in lines[3]
