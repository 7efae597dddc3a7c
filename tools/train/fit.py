"""The resumable training loop: bf16 autocast on CUDA, AdamW, warm-up and cosine, accumulation, clipping."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.train import data, shards, state
from tools.train.batches import Frames, load_frames
from tools.train.network import Trainee, architecture_of, initialize
from tools.train.objective import Losses, evaluate_batch, step_losses
from tools.train.recipe import (
    DataRecipe,
    FitOptions,
    FitRecipe,
    LabelRecipe,
    NetworkRecipe,
    as_json,
    claim,
    from_json,
)
from tools.train.tokens import Prompts, encode_actions, shape_actions, statistics_json, statistics_of
from vla_ros.errors import VlaRosError
from vla_ros.policies.openvla.actions import ActionBins
from vla_ros.policies.openvla.architecture import Architecture

logger = logging.getLogger(__name__)

RECIPE = "recipe.json"
STATE = "state.safetensors"
LOG = "log.jsonl"
STATISTICS = "statistics.json"
_EVALUATION_BATCHES = 4  # of held-out frames


def rate(step: int, recipe: FitRecipe, seconds: float = 0.0) -> float:
    """Learning rate of a step: linear warm-up, then cosine decay to ``final_share`` by steps or by time."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    share = max(share, seconds / recipe.span) if recipe.span else share
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return recipe.learning_rate * (recipe.final_share + (1 - recipe.final_share) * cosine)


def make_optimizer(trainee: torch.nn.Module, recipe: FitRecipe) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, not on norms, biases and embeddings."""
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


class Run:
    """A training run in ``folder``, on the demonstrations in ``dataset``; resumes from a saved state.

    Raises:
        ConfigError: The folder has another recipe.
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
        self.folder, self.recipe, self.options = folder, fit, options or FitOptions()
        self._dataset = dataset
        self._data = from_json(DataRecipe, json.loads((dataset / data.MANIFEST).read_text(encoding="utf-8")))
        self._labels = labels
        claim(
            folder / RECIPE,
            {
                "data": as_json(self._data),
                "network": as_json(network),
                "labels": as_json(labels),
                "fit": as_json(fit),
            },
        )
        choice = self.options.device
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice)
        self.architecture: Architecture = architecture_of(network)
        self.bins = ActionBins(self.architecture.action_vocab_size, self.architecture.action_bins)
        self.trainee = Trainee(self.architecture)
        initialize(self.trainee, fit.seed)
        self.trainee.to(self.device)
        self.optimizer = make_optimizer(self.trainee, fit)
        self.step, self.seconds = 0, 0.0
        if (folder / STATE).exists():
            self.step, self.seconds = state.restore(folder / STATE, self.trainee, self.optimizer)

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.recipe.steps

    def load(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Frames:
        """Load the demonstrations onto the device and write their statistics; ``progress`` gets (frames, total)."""
        paths = data.shard_paths(self._dataset)
        labels = shards.read_labels(paths)
        actions = shape_actions(labels.actions, self._labels)
        statistics = statistics_json(labels, actions)
        (self.folder / STATISTICS).write_text(json.dumps(statistics, indent=1) + "\n", encoding="utf-8")
        chosen = statistics_of(statistics)
        self._reach = torch.from_numpy(chosen.high[:3]).float().to(self.device)
        prompts = Prompts(self.folder, self.architecture, self._data.tasks)
        tokens = encode_actions(actions, chosen, self.bins)
        return load_frames(paths, labels, tokens, prompts, self.device, lambda done: progress(done, len(labels)))

    def train(
        self, frames: Frames, progress: Callable[[int, dict[str, float]], None] = lambda step, figures: None
    ) -> dict[str, float]:
        """Train to the end or the time limit; returns the latest figures on held-out frames.

        ``progress`` is called with each logged step and its figures.
        """
        torch.set_float32_matmul_precision("high")
        compute: Callable[..., Losses] = torch.compile(step_losses) if self.options.compile else step_losses
        recipe, options = self.recipe, self.options
        began = saved = time.monotonic()
        before = self.seconds
        figures: dict[str, float] = {}
        self.trainee.train()
        marked, marked_at = self.step, began
        while not self.done:
            newest = self._take_step(compute, frames)
            now = time.monotonic()
            self.seconds = before + now - began
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
            if now - saved > options.save_every or self.done:
                state.save(self.folder / STATE, self.trainee, self.optimizer, self.step, self.seconds)
                saved = time.monotonic()
            if options.time_limit and now - began > options.time_limit and not self.done:
                state.save(self.folder / STATE, self.trainee, self.optimizer, self.step, self.seconds)
                break
        return figures or self.evaluate(frames)

    def _take_step(self, compute: Callable[..., Losses], frames: Frames) -> Losses:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.step, recipe)
        for part in range(recipe.accumulate):
            batch = frames.draw(self.step * recipe.accumulate + part, recipe.seed, recipe.batch, recipe.prompts)
            with self._autocast():
                newest = compute(self.trainee, batch, recipe)
            (newest.total / recipe.accumulate).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.trainee.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Losses(*(value.detach() for value in newest))

    def evaluate(self, frames: Frames) -> dict[str, float]:
        """Figures on held-out frames, averaged over a few fixed batches."""
        self.trainee.eval()
        found = []
        for number in range(_EVALUATION_BATCHES):
            batch = frames.draw(number, 0, self.recipe.batch, self.recipe.prompts, held_out=True)
            with self._autocast():
                found.append(
                    evaluate_batch(self.trainee, batch, self.recipe.prompts, self._reach, self.bins, self.recipe)
                )
        self.trainee.train()
        return {name: round(float(np.mean([each[name] for each in found])), 5) for name in found[0]}

    def _describe(self, newest: Losses, frames_per_s: float) -> dict[str, float]:
        figures = {name: round(float(value), 5) for name, value in newest._asdict().items()}
        if not math.isfinite(figures["total"]):
            found = f"step {self.step}: found a loss of {figures['total']}"
            raise VlaRosError(f"{found}, expected a finite number; lower --learning-rate")
        return {
            **figures,
            "learning_rate": rate(self.step, self.recipe),
            "frames_per_s": round(frames_per_s, 1),
            "seconds": round(self.seconds, 1),
        }

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _log(self, kind: str, figures: dict[str, float]) -> None:
        with (self.folder / LOG).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": kind, "step": self.step, **figures}) + "\n")
