"""Convert a LeRobot data set with actions of the tool and gripper to frames for ``python -m tools.train``.

  vla-ros export BAGS --config demo --action "arm.tip_delta + arm.gripper" --clock frames --fps 10 --output SET
  python -m tools.flywheel.lerobot SET RUN DATA MORE_RUN MORE_DATA
  python -m tools.train fit MORE_DATA MORE_RUN --steps MORE

RUN was trained on DATA. MORE_DATA gets DATA's frames and as many of SET, repeated; MORE_RUN gets RUN's state, from
which a longer training continues. If a person corrects in SET, only the frames of the corrections are used.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from tools.train import data, shards, state
from tools.train.export import FACTS
from tools.train.labels import KINDS, NOWHERE
from tools.train.loop import RECIPE, STATE, STATISTICS, make_optimizer
from tools.train.network import Trainee, architecture_of, initialize
from tools.train.recipe import FitRecipe, NetworkRecipe, from_json
from vla_ros.errors import VlaRosError
from vla_ros.types import UInt8Array
from vla_ros_lab.sim.arm import FINGER_TRAVEL
from vla_ros_lab.sim.tasks import SLOTS, parse_instruction
from vla_ros_models.checkpoint_files import read_json

_SHARD = 90_000  # number of the first shard with frames of a data set
_SEED = 1_000_000  # times the episode; no such episode is held out
_WIDTH = 7  # numbers of an action


def convert(folder: Path) -> shards.Shard:
    """Return the frames of the data set in ``folder``, of which each names one object.

    Raises:
        VlaRosError: The actions are not a delta of the tool [6] and a gripper, or the task is not to pick.
    """
    tables = [pq.read_table(path) for path in sorted(folder.glob("data/*/*.parquet"))]
    columns = {
        name: np.concatenate([np.array(table[name].to_pylist()) for table in tables])
        for name in ("observation.state", "action", "intervention", "episode_index", "frame_index", "task_index")
    }
    actions, count = columns["action"], len(columns["action"])
    if actions.shape != (count, _WIDTH) or columns["observation.state"].shape != (count, _WIDTH + 1):
        found = f"{folder}: found actions {actions.shape[1:]} and states {columns['observation.state'].shape[1:]}"
        raise VlaRosError(f"{found}, expected ({_WIDTH},) and ({_WIDTH + 1},); see --action of vla-ros export")
    tasks = pq.read_table(folder / "meta/tasks.parquet").to_pydict()
    kinds = np.full((count, SLOTS), NOWHERE, np.int8)
    kinds[:, 0] = np.array([_kind(text) for text in tasks["task"]])[columns["task_index"]]
    corrected = columns["intervention"].astype(bool)
    rows = np.flatnonzero(corrected) if corrected.any() else np.arange(count)
    states = columns["observation.state"][rows].astype(np.float32)
    states[:, -1] *= FINGER_TRAVEL
    labels = np.zeros((len(rows), 1, SLOTS, _WIDTH), np.float32)
    labels[:, 0, 0] = actions[rows]
    labels[:, 0, 0, -1] = actions[rows, -1] > 0.5
    wanted = set(rows.tolist())
    blob, offsets = shards.pack(frames := [each for row, each in enumerate(_images(folder)) if row in wanted])
    episodes = columns["episode_index"][rows]
    made = shards.Labels(
        seeds=(_SEED * episodes).astype(np.int64),
        steps=columns["frame_index"][rows].astype(np.int16),
        kinds=kinds[rows],
        patches=np.full((len(rows), SLOTS), NOWHERE, np.int16),
        states=states,
        actions=labels,
        asked=np.zeros((len(rows), 2), np.int8),
        noise=np.zeros(len(rows), np.float32),
    )
    numbers, lengths = np.unique(episodes, return_counts=True)
    results = np.stack([_SEED * numbers, np.ones_like(numbers), lengths], axis=1)
    return shards.Shard(made, blob, offsets, frames[0].shape[:2], results)


def _kind(text: str) -> int:
    task = parse_instruction(text)
    if task is None or task.name != "pick":
        raise VlaRosError(f"found the task {text!r}, expected to pick up one object")
    return KINDS.index(task.target)


def _images(folder: Path) -> Iterator[UInt8Array]:
    """Yield the images of the only camera in order, uint8 [H, W, 3]."""
    for path in sorted(folder.glob("videos/*/*/*.mp4")):
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                yield np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)


def add(folder: Path | None, dataset: Path, target: Path) -> tuple[int, int]:
    """Write ``target``: the frames of ``dataset``, and as many of the data set in ``folder``, which are repeated.

    Returns the numbers of frames of both, not repeated. Without a folder, there are only those of ``dataset``.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(dataset / data.MANIFEST, target)
    for path in data.shard_paths(dataset):
        (target / path.name).hardlink_to(path)
    old, used = len(shards.read_labels(data.shard_paths(dataset))), 0
    if folder is not None:
        shard = convert(folder)
        used, first = len(shard.labels), target / f"shard-{_SHARD}.npz"
        shards.write(first, shard)
        for number in range(1, max(1, round(old / used))):
            first.with_name(f"shard-{_SHARD + number}.npz").hardlink_to(first)
    (target / "frames.json").write_text(json.dumps({"demonstrations": old, "set": used}) + "\n", encoding="utf-8")
    return old, used


def begin_from(run: Path, folder: Path) -> None:
    """Let the training in ``folder``, unless it has begun, continue from the training or checkpoint in ``run``."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RECIPE).exists():
        return
    if (run / STATE).exists():
        for name in (STATISTICS, STATE):
            shutil.copy(run / name, folder)
        return
    shutil.copy(run / "dataset_statistics.json", folder / STATISTICS)
    trainee = Trainee(architecture_of(from_json(NetworkRecipe, read_json(run / FACTS)["network"])))
    initialize(trainee, 0)  # its heads, which a checkpoint does not have
    stored: dict[str, torch.Tensor] = {}
    for path in run.glob("model*.safetensors"):
        stored |= load_file(path)
    trainee.model.load_state_dict(stored)
    state.save(folder / STATE, trainee, make_optimizer(trainee, FitRecipe()), 0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_argument = parser.add_argument
    add_argument("set", type=Path, help="folder of the LeRobot data set; none: no more frames")
    add_argument("run", type=Path, help="folder of the training that continues")
    add_argument("data", type=Path, help="folder of its demonstrations")
    add_argument("more_run", type=Path, help="folder in which the training continues")
    add_argument("more_data", type=Path, help="folder of its frames")
    given = parser.parse_args()
    old, used = add(None if str(given.set) == "none" else given.set, given.data, given.more_data)
    begin_from(given.run, given.more_run)
    print(f"{given.more_data}: {old} frames of the demonstrations, {used} of the data set")


if __name__ == "__main__":
    main()
