"""A resumable training loop: bf16 autocast on CUDA, AdamW, warm-up and cosine decay, accumulation, clipping."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from tools.train import state
from tools.train.recipe import FitOptions, FitRecipe, claim
from vla_ros.errors import VlaRosError

RECIPE = "recipe.json"
STATE = "state.safetensors"
LOG = "log.jsonl"
STATISTICS = "statistics.json"
_EVALUATION_BATCHES = 4  # batches of held-out frames

F = TypeVar("F")
Trained = TypeVar("Trained", bound=torch.nn.Module)


def rate(step: int, recipe: FitRecipe, seconds: float = 0.0) -> float:
    """Return a step's learning rate: linear warm-up, then cosine decay to ``final_share`` over steps or time."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    share = max(share, seconds / recipe.span) if recipe.span else share
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return recipe.learning_rate * (recipe.final_share + (1 - recipe.final_share) * cosine)


def make_optimizer(trainee: torch.nn.Module, recipe: FitRecipe) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices, but not on norms, biases or embeddings."""
    named = list(trainee.named_parameters())
    plain = [
        parameter for name, parameter in named if parameter.ndim < 2 or "embed" in name.replace("patch_embed", "")
    ]
    spared = {id(parameter) for parameter in plain}
    groups = [
        {
            "params": [parameter for _, parameter in named if id(parameter) not in spared],
            "weight_decay": recipe.weight_decay,
        },
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = named[0][1].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=fused)


def choose_device(name: str) -> torch.device:
    """Return a torch device; ``auto`` is CUDA if available."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


class Training(ABC, Generic[F, Trained]):
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
    """

    def __init__(
        self,
        folder: Path,
        recipes: Mapping[str, Any],
        trainee: Trained,
        losses: Callable[..., Any],
        fit: FitRecipe,
        options: FitOptions,
    ) -> None:
        claim(folder / RECIPE, dict(recipes))
        self.folder, self.recipe, self.options, self._losses = folder, fit, options, losses
        self.device = choose_device(options.device)
        self.trainee = trainee.to(self.device)
        self.optimizer = make_optimizer(self.trainee, fit)
        self.step, self.seconds = 0, 0.0
        if (folder / STATE).exists():
            self.step, self.seconds = state.restore(folder / STATE, self.trainee, self.optimizer)

    @property
    def done(self) -> bool:
        """True once all steps are done or the time span has passed."""
        return self.step >= self.recipe.steps or 0 < self.recipe.span <= self.seconds

    @abstractmethod
    def draw(self, frames: F, step: int, *, held_out: bool = False) -> Any:
        """Return the batch of a step."""

    @abstractmethod
    def measure(self, frames: F, batch: Any) -> Mapping[str, float]:
        """Return the figures of a batch of held-out frames; called without gradients."""

    def train(
        self, frames: F, progress: Callable[[int, dict[str, float]], None] = lambda step, figures: None
    ) -> dict[str, float]:
        """Train to the end or the time limit; return the latest figures on held-out frames.

        ``progress`` is called with each logged step and its figures.
        """
        torch.set_float32_matmul_precision("high")
        compute = torch.compile(self._losses) if self.options.compile else self._losses
        recipe, options = self.recipe, self.options
        began = saved = marked_at = time.monotonic()
        before, marked = self.seconds, self.step
        figures: dict[str, float] = {}
        self.trainee.train()
        late = False
        while not self.done and not late:
            newest = self._take_step(compute, frames)
            now = time.monotonic()
            self.seconds = before + now - began
            late = bool(options.time_limit) and now - began > options.time_limit
            if self.step % options.log_every == 0 or self.done:
                count = (self.step - marked) * recipe.batch * recipe.accumulate
                figures = self._describe(newest, count / max(time.monotonic() - marked_at, 1e-9))
                self._log("step", figures)
                progress(self.step, figures)
                marked, marked_at = self.step, time.monotonic()
            if self.step % (10 * options.log_every) == 0 or self.done:
                figures = self.evaluate(frames)
                self._log("held_out", figures)
                marked_at = time.monotonic()
            if now - saved > options.save_every or self.done or late:
                state.save(self.folder / STATE, self.trainee, self.optimizer, self.step, self.seconds)
                saved = time.monotonic()
        return figures or self.evaluate(frames)

    def _take_step(self, compute: Callable[..., Any], frames: F) -> dict[str, torch.Tensor]:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.step, recipe, self.seconds)
        for part in range(recipe.accumulate):
            batch = self.draw(frames, self.step * recipe.accumulate + part)
            with self._autocast():
                newest = compute(self.trainee, batch, recipe)
            (newest.total / recipe.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(self.trainee.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {name: value.detach() for name, value in newest._asdict().items()}

    @torch.no_grad()
    def evaluate(self, frames: F) -> dict[str, float]:
        """Return the figures on held-out frames, averaged over a few fixed batches."""
        self.trainee.eval()
        found = []
        for number in range(_EVALUATION_BATCHES):
            batch = self.draw(frames, number, held_out=True)
            with self._autocast():
                found.append(self.measure(frames, batch))
        self.trainee.train()
        return {name: round(float(np.mean([float(each[name]) for each in found])), 5) for name in found[0]}

    def _describe(self, newest: Mapping[str, torch.Tensor], frames_per_s: float) -> dict[str, float]:
        figures = {name: round(float(value), 5) for name, value in newest.items()}
        if not math.isfinite(figures["total"]):
            found = f"step {self.step}: found a loss of {figures['total']}"
            raise VlaRosError(f"{found}, expected a finite number; lower --learning-rate")
        return {
            **figures,
            "learning_rate": rate(self.step, self.recipe, self.seconds),
            "frames_per_s": round(frames_per_s, 1),
            "seconds": round(self.seconds, 1),
        }

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _log(self, kind: str, figures: Mapping[str, float]) -> None:
        with (self.folder / LOG).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": kind, "step": self.step, **figures}) + "\n")
