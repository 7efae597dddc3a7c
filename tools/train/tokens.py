"""Converts the expert's actions to tokens, and tasks to prompts."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.checkpoints.vocabulary import write_tokenizer
from tools.train.labels import KINDS
from tools.train.network import token_ids
from tools.train.recipe import DATASET, FOREIGN_DATASET, LabelRecipe
from tools.train.shards import Labels
from vla_ros.types import FloatArray, IntArray
from vla_ros_lab.sim.tasks import make_task
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.openvla.processing import ActionBins, ActionStatistics
from vla_ros_models.openvla.prompt import load_prompt_encoder

_TURN = 0.05  # rad; the hand hardly turns, so bins from percentiles would only resolve noise
_MASK = (True, True, True, True, True, True, False)

FOREIGN_STATISTICS: dict[str, Any] = {
    "action": {
        "mask": list(_MASK),
        "q01": [-0.224535275, -0.148200133, -0.231589708, -0.351799486, -0.419301127, -0.436434611, 0.0],
        "q99": [0.178246872, 0.149383796, 0.218423548, 0.589266604, 0.352726574, 0.447966813, 1.0],
    },
    "num_transitions": 3786400,
}
"""Percentiles of RT-1's robot data from openvla/openvla-7b (``fractal20220817_data``, rounded).

Besides ``bridge_orig``, this is the key that users often copy from examples. With it, standing still becomes 2 cm
backwards and 0.12 rad about x.
"""


def shape_actions(actions: NDArray[np.float32], recipe: LabelRecipe) -> FloatArray:
    """Convert the expert's actions [..., 7] (gripper 1 open, 0 closed) to labels according to ``recipe``."""
    shaped = actions.astype(np.float64)
    shaped[..., 6] = recipe.closed_value + (1.0 - recipe.closed_value) * shaped[..., 6]
    return shaped


def followed(labels: Labels, actions: FloatArray) -> FloatArray:
    """Select the actions that the arm was following, float64 [N, 7], from ``actions`` [N, tasks, SLOTS, 7]."""
    rows = np.arange(len(labels))
    return actions[rows, labels.asked[:, 0], labels.asked[:, 1]]


def statistics_json(labels: Labels, actions: FloatArray) -> dict[str, Any]:
    """Return ``norm_stats``: statistics of the ``actions`` [N, tasks, SLOTS, 7], and :data:`FOREIGN_STATISTICS`.

    As in OpenVLA, these are percentiles 1 and 99 of the followed actions, here made symmetric so that zero is the
    middle of a bin; rotations get +-0.05 rad.
    """
    steps = followed(labels, actions)
    return {DATASET: _entry(steps), FOREIGN_DATASET: FOREIGN_STATISTICS}


def _entry(steps: FloatArray) -> dict[str, Any]:
    low, high = np.percentile(steps[:, :3], [1, 99], axis=0)
    reach = np.round(np.maximum(np.abs(low), np.abs(high)), 5).tolist()
    q99 = [*reach, _TURN, _TURN, _TURN, 1.0]
    q01 = [*(-value for value in reach), -_TURN, -_TURN, -_TURN, 0.0]
    return {"action": {"mask": list(_MASK), "q01": q01, "q99": q99}, "num_transitions": len(steps)}


def statistics_of(entry: dict[str, Any], key: str = DATASET) -> ActionStatistics:
    """Return an entry of :func:`statistics_json` as the policy reads it."""
    action = entry[key]["action"]
    return ActionStatistics(key, np.array(action["q01"]), np.array(action["q99"]), np.array(action["mask"]))


def encode_actions(actions: FloatArray, statistics: ActionStatistics, bins: ActionBins) -> NDArray[np.int16]:
    """Return the tokens of ``actions``, int16 of the same shape; uses only the 255 tokens with distinct bins.

    OpenVLA's encoder has a 256th token, for the value 1, which decodes to the same value as its neighbour.
    """
    tokens = bins.encode(statistics.normalize(actions))
    return np.maximum(tokens, bins.vocab_size - (bins.count - 1)).astype(np.int16)


class Prompts:
    """The policy's prompts for all tasks and objects; writes the tokenizer's files to ``folder``."""

    def __init__(self, folder: Path, architecture: Architecture, tasks: tuple[str, ...]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, token_ids())
        encoder = load_prompt_encoder(folder, architecture)
        rows: list[IntArray] = [
            encoder.encode(make_task(task, kind).instruction) for task in tasks for kind in KINDS
        ]
        self.lengths: Tensor = torch.tensor([len(row) for row in rows])
        """Int64 [tasks * kinds], number of tokens of each prompt."""
        self.ids: Tensor = torch.zeros(len(rows), int(self.lengths.max()), dtype=torch.int64)
        """Int64 [tasks * kinds, L], padded with 0."""
        for index, row in enumerate(rows):
            self.ids[index, : len(row)] = torch.from_numpy(row)
