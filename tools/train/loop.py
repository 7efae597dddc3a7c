"""Trains a network of the tools with the package's trainer, on frames that one device holds."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tools.train.recipe import FitOptions, FitRecipe, claim
from vla_ros.errors import CheckpointError
from vla_ros_lab.training.recipes import LoraRecipe, Recipe, warm_cosine
from vla_ros_lab.training.state import restore_state
from vla_ros_lab.training.trainer import RunResult, Say, TrainOptions, train
from vla_ros_models.network_policy import choose_device
from vla_ros_models.training import BatchLoss

RECIPE = "recipe.json"
LOG = "log.jsonl"
STATISTICS = "statistics.json"
_EVALUATION_BATCHES = 4  # batches of held-out frames

_NO_LAYER = LoraRecipe(r"$.", 0, 0.0)  # no adapter trains here

F = TypeVar("F")
Trainee = TypeVar("Trainee", bound=nn.Module)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """The weight decay acts on matrices, but not on norms, biases or embeddings."""
    return parameter.ndim >= 2 and "embed" not in name.replace("patch_embed", "")


class Fitted(NamedTuple):
    """A network that trains in full (see the trainer's ``Trained``)."""

    trainee: nn.Module
    parameters: dict[str, nn.Parameter]
    learning_rate: float = 0.0


class Batches(NamedTuple):
    """The batches of a run, which its device makes (see the trainer's ``Source``)."""

    draw: Callable[[int], Any]

    def batches(self, start: int, steps: int, batch: int, accumulation: int, *_: object) -> Iterator[Any]:
        return map(self.draw, range(start * accumulation, steps * accumulation))


def curve(run: Path) -> list[dict[str, Any]]:
    """Return the figures on held-out frames in a run's log, in order of step; [] without a log.

    If a resumed run evaluated a step twice, the later figures are returned, which are those of the saved weights.
    """
    if not (run / LOG).exists():
        return []
    lines = [json.loads(line) for line in (run / LOG).read_text(encoding="utf-8").splitlines()]
    return list({line["step"]: line for line in lines}.values())


def restored(run: Path, trainee: nn.Module) -> tuple[int, float]:
    """Restore a run's newest state; return its steps and the seconds of training.

    Raises CheckpointError if there is none, or it is of another network.
    """
    step, _ = restore_state(run, dict(trainee.named_parameters()))
    if not step:
        raise CheckpointError(f"{run}: has no state; train first")
    return step, float(sum(line["seconds"] for line in curve(run)[-1:]))


class _Losses(nn.Module):
    """Maps a batch to its loss; ``losses`` returns a NamedTuple with a field ``total``."""

    def __init__(self, trainee: nn.Module, losses: Callable[..., Any], recipe: FitRecipe) -> None:
        super().__init__()
        self.trainee, self.losses, self.recipe = trainee, losses, recipe

    def forward(self, batch: Any) -> BatchLoss:
        total: Tensor = self.losses(self.trainee, batch, self.recipe).total
        return BatchLoss(total, total)


class Training(ABC, Generic[F, Trainee]):
    """A training run in ``folder`` on frames of type F; resumes from a saved state.

    Args:
        folder: Folder of the run.
        recipes: Everything that determines the result, as JSON.
        trainee: The initialised network and its heads.
        losses: Maps trainee, batch and recipe to a NamedTuple of losses with a field ``total``.
        fit: Recipe of the training.
        options: Options that do not change the result.

    Raises:
        ConfigError: The folder belongs to a run with another recipe.
        CheckpointError: Its state is damaged.
    """

    def __init__(
        self,
        folder: Path,
        recipes: Mapping[str, Any],
        trainee: Trainee,
        losses: Callable[..., Any],
        fit: FitRecipe,
        options: FitOptions,
    ) -> None:
        claim(folder / RECIPE, dict(recipes))
        self.folder, self.recipe, self.options = folder, fit, options
        self.device = choose_device(options.device)
        self.trainee = trainee.to(self.device)
        self._losses = _Losses(self.trainee, losses, fit)
        self._parameters = dict(self.trainee.named_parameters())
        self.step, _ = restore_state(folder, self._parameters)

    @property
    def done(self) -> bool:
        """True once all steps are done."""
        return self.step >= self.recipe.steps

    @abstractmethod
    def draw(self, frames: F, step: int, *, held_out: bool = False) -> Any:
        """Return the batch of a step."""

    @abstractmethod
    def measure(self, frames: F, batch: Any) -> Mapping[str, float]:
        """Return the figures of a batch of held-out frames; called without gradients."""

    def train(self, frames: F, say: Say = lambda line: None) -> RunResult:
        """Train to the end; figures on held-out frames go to the log with each saved state."""
        torch.set_float32_matmul_precision("high")
        if self.options.compile:
            self._losses.compile()
        fit, options = self.recipe, self.options
        schedule = partial(warm_cosine, warmup=fit.warmup, final=fit.final_share)
        recipe = Recipe(
            "tools.train.recipe", fit.learning_rate, schedule, fit.batch, fit.steps, "", _NO_LAYER,
            weight_decay=fit.weight_decay, decays=decays, clip=fit.clip,
        )  # fmt: skip
        how = TrainOptions(accumulation=fit.accumulate, seed=fit.seed, workers=0, save_every=options.save_every)
        fitted = Fitted(self._losses, self._parameters)
        begun = time.monotonic() - sum(line["seconds"] for line in curve(self.folder)[-1:])
        saved = partial(self._saved, frames, begun)
        return train(fitted, Batches(partial(self.draw, frames)), recipe, how, self.folder, say, saved)

    def _saved(self, frames: F, begun: float, step: int) -> None:
        self.step = step
        line = {"step": step, **self.evaluate(frames), "seconds": round(time.monotonic() - begun, 1)}
        with (self.folder / LOG).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    @torch.no_grad()
    def evaluate(self, frames: F) -> dict[str, float]:
        """Return the figures on held-out frames, averaged over a few fixed batches."""
        self.trainee.eval()
        found = []
        for number in range(_EVALUATION_BATCHES):
            with self._autocast():
                found.append(self.measure(frames, self.draw(frames, number, held_out=True)))
        self.trainee.train()
        return {name: round(float(np.mean([float(each[name]) for each in found])), 5) for name in found[0]}

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
