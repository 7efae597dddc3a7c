"""Trains the small OpenVLA."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tools.train import data, shards
from tools.train.batches import Batch, Frames, moved, table_frames
from tools.train.loop import STATISTICS, Training
from tools.train.network import ACTION_TOKENS, Trainee, architecture_of, initialize
from tools.train.objective import evaluate_batch, step_losses
from tools.train.recipe import (
    DataRecipe,
    FitOptions,
    FitRecipe,
    LabelRecipe,
    NetworkRecipe,
    as_json,
    from_json,
)
from tools.train.tokens import Prompts, encode_actions, shape_actions, statistics_json, statistics_of
from vla_ros_models.checkpoint_files import read_json
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.openvla.processing import ActionBins


class Run(Training[Frames, Trainee]):
    """A training run in ``folder`` on the demonstrations in ``dataset``; resumes from a saved state.

    Raises:
        ConfigError: The folder belongs to a run with another recipe.
        VlaRosError: There are no demonstrations.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Path,
        network: NetworkRecipe,
        labels: LabelRecipe,
        fit: FitRecipe,
        options: FitOptions | None = None,
    ) -> None:
        self._dataset, self._labels = dataset, labels
        self._data = from_json(DataRecipe, json.loads((dataset / data.MANIFEST).read_text(encoding="utf-8")))
        self.architecture: Architecture = architecture_of(network)
        self.bins = ActionBins(self.architecture.action_vocab_size, self.architecture.action_bins)
        trainee = Trainee(self.architecture)
        initialize(trainee, fit.seed)
        recipes = {"data": as_json(self._data), "network": as_json(network)}
        recipes |= {"labels": as_json(labels), "fit": as_json(fit)}
        super().__init__(folder, recipes, trainee, step_losses, fit, options or FitOptions())

    def load(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Frames:
        """Load the demonstrations onto the device and write their statistics; calls ``progress(frames, total)``."""
        paths = data.shard_paths(self._dataset)
        labels = shards.read_labels(paths)
        actions = shape_actions(labels.actions, self._labels)
        path = self.folder / STATISTICS
        if not path.exists():  # tokens keep their meaning when a run continues with more data
            path.write_text(json.dumps(statistics_json(labels, actions), indent=1) + "\n", encoding="utf-8")
        statistics = read_json(path)
        chosen = statistics_of(statistics)
        self._reach = torch.from_numpy(chosen.high[:3]).float().to(self.device)
        prompts = Prompts(self.folder, self.architecture, self._data.tasks)
        tokens = encode_actions(actions, chosen, self.bins)
        return Frames(
            **table_frames(paths, labels, self.device, lambda done: progress(done, len(labels))),
            tokens=moved(tokens.reshape(len(labels), -1, ACTION_TOKENS), self.device, torch.int16),
            prompts=prompts.ids.to(self.device),
            lengths=prompts.lengths.to(self.device),
        )

    def draw(self, frames: Frames, step: int, *, held_out: bool = False) -> Batch:
        recipe = self.recipe
        return frames.draw(step, 0 if held_out else recipe.seed, recipe.batch, recipe.prompts, held_out=held_out)

    def measure(self, frames: Frames, batch: Batch) -> Mapping[str, float]:
        return evaluate_batch(self.trainee, batch, self.recipe.prompts, self._reach, self.bins, self.recipe)
