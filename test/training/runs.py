"""Samples in memory of an arm that moves as its image says, and runs on them.

As a script, one run; ``python test/training/runs.py kill FOLDER`` kills one at 20 random moments.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("accelerate", reason="the library accelerate is not installed (extra 'train')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

import torch

from vla_ros.config import load
from vla_ros.policies.base import create
from vla_ros.types import Observation
from vla_ros_lab.training.adapting import AdapterOptions, adapt
from vla_ros_lab.training.recipes import recipe_of
from vla_ros_lab.training.samples import Sample
from vla_ros_lab.training.stream import SampleStream
from vla_ros_lab.training.trainer import TrainOptions, train
from vla_ros_models.checkpoint_files import checkpoint_folder
from vla_ros_models.network_policy import Placement

TASKS = ("pick up the red cube", "open the top drawer", "put both pots on the stove")


@dataclass(frozen=True, eq=False)
class ArmSamples:
    """Episodes of different lengths; actions follow from the brightness of the image, and the arm lags behind."""

    spec: object
    lengths: tuple = (7, 12, 5, 9)
    seed: int = 0

    @cached_property
    def episodes(self):
        ends = np.cumsum([0, *self.lengths]).tolist()
        return [range(*pair) for pair in pairwise(ends)]

    def __len__(self):
        return sum(self.lengths)

    def __getitem__(self, index):
        episode = next(number for number, one in enumerate(self.episodes) if index in one)
        frame = index - self.episodes[episode].start
        spec, steps = self.spec, frame + np.arange(self.spec.horizon)
        random = np.random.default_rng((self.seed, index))
        images = {}
        for one in spec.images:
            level = int(20 + 200 * frame / self.lengths[episode])
            picture = random.integers(max(0, level - 20), level + 20, (60, 80, 3)).astype(np.uint8)
            images[one.key] = one.processor(picture)
        at = np.minimum(steps, self.lengths[episode] - 1)
        path = np.sin(0.3 * at[:, None] + np.arange(spec.dimension)) * 0.2 + 0.3
        state = {one.key: np.sin(0.3 * frame - 0.1 + np.arange(one.size)) * 0.2 + 0.3 for one in spec.state}
        points = {key: random.uniform(-1, 1, (60, 80, 3)).astype(np.float32) for _, key in spec.points}
        for one in points.values():
            one[:30, :40] = np.nan  # unknown
        seen = Observation(images, TASKS[episode % len(TASKS)], stamp=index, state=state, points=points)
        return Sample(seen, path, steps >= self.lengths[episode], episode, frame)


DATA = Path(__file__).parents[1] / "data"
CPU = Placement(torch.device("cpu"), "float32")
VLM = f"policy.vlm:={DATA}/smolvla/vlm"
SMOLVLA = DATA / "smolvla" / "default"
OPTIONS = {
    "smolvla": (SMOLVLA, (VLM,)),
    "openvla": (checkpoint_folder("demo"), ("policy.unnorm_key:=table_10hz",)),
    "oft": (DATA / "oft" / "libero_l1", ("preset:=libero", "policy.name:=oft")),
    "pi05": (checkpoint_folder("demo-pi"), ()),
    "groot": (
        DATA / "groot" / "lerobot_relative",
        (f"policy.backbone:={DATA}/groot/backbone", f"policy.base_model:={DATA}/groot/two"),
    ),
}


def policy_of(folder, *options):
    given = [f"policy.checkpoint:={folder}", "policy.device:=cpu", "policy.self_test:=false", *options]
    return create(load([], given))


def opened(family="smolvla", adapter="lora", **options):
    folder, settings = OPTIONS[family]
    trainable = policy_of(folder, *settings).trainable(CPU)
    torch.manual_seed(0)
    return adapt(
        trainable, recipe_of(trainable.family, trainable.layout), AdapterOptions(adapter, **options), "cpu"
    )


def stream_of(adapted, lengths=(7, 12, 5, 9)):
    samples = ArmSamples(adapted.trainable.spec, lengths)
    return SampleStream(samples, samples.episodes, adapted.trainable.inputs, seed=0)


def run(adapted, folder, steps=4, **options):
    trainable = adapted.trainable
    options = {"batch": 2, "workers": 0, "learning_rate": 1e-3, **options}
    recipe = recipe_of(trainable.family, trainable.layout)
    return train(
        adapted, stream_of(adapted), recipe, TrainOptions(steps=steps, **options), folder, lambda line: None
    )


PART = r"action_|time_mlp|paligemma_with_expert.gemma_expert"
"""What trains in runs of processes of their own: a part of the demo's pi0.5."""


def newest(folder):
    return max((int(one.name.removeprefix("step-")) for one in folder.glob("step-*")), default=0)


def fork(folder, steps):
    """Begin or resume a run in a child, and return its process id; its losses go to a file."""
    if process := os.fork():
        return process
    try:
        found = run(opened("pi05", "full", train=PART), folder, steps, save_every=1)
        (folder / "losses.json").write_text(json.dumps(found.losses))
    finally:
        os._exit(0 if (folder / "losses.json").exists() else 1)


def killed(folder, steps, kills, seed=0):
    """Kill a run ``kills`` times, then let it end; return after which steps it was killed.

    One kill in four is at a random moment of the start, the others from the first step on: while a step is
    computed, while a state is written, between the two.
    """
    random, after, spans = np.random.default_rng(seed), [], []
    for _ in range(kills):
        before, began, process = newest(folder), time.monotonic(), fork(folder, steps)
        if spans and random.random() < 0.25:
            time.sleep(random.uniform(0, min(spans)))
        else:
            while newest(folder) == before and os.waitpid(process, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
            spans.append(time.monotonic() - began)
            time.sleep(random.uniform(0, 0.2))
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "it ended before it was killed: more steps are needed"
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        after.append(newest(folder))
    assert os.waitpid(fork(folder, steps), 0)[1] == 0
    return after


def compare_killed(folder, kills, steps):
    """Print after which steps a run was killed, and whether its losses are those of an unbroken one to the bit."""
    torch.set_num_threads(1)
    after = killed(folder / "killed", steps, kills)
    assert os.waitpid(fork(folder / "whole", steps), 0)[1] == 0
    losses = [json.loads((folder / name / "losses.json").read_text()) for name in ("killed", "whole")]
    print(f"killed after the steps {after}; losses of {len(losses[0])} steps equal: {losses[0] == losses[1]}")
    return int(losses[0] != losses[1])


if __name__ == "__main__":
    if sys.argv[1] == "kill":  # FOLDER [KILLS [STEPS]]
        sys.exit(compare_killed(Path(sys.argv[2]), *(map(int, sys.argv[3:] or (20, 120)))))
    folder, steps, batch, pattern = sys.argv[1:]
    found = run(opened("pi05", "full", train=pattern), Path(folder), int(steps), batch=int(batch), save_every=1)
    if not int(os.environ.get("RANK", "0")):
        Path(folder, "losses.json").write_text(json.dumps(found.losses))
