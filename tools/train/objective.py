"""The loss: action tokens, and the two questions that make the network look where the words point.

Cross entropy on the actions alone is content with grasping *something*: the instruction decides few of the frames.
The auxiliary losses ask for the named object's patch and for what each patch shows; their heads are thrown away.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tools.train.batches import NOT_ASKED, Batch
from tools.train.labels import KINDS
from tools.train.network import Predictions, Trainee
from tools.train.recipe import FitRecipe
from vla_ros.policies.openvla.actions import ActionBins


class Losses(NamedTuple):
    """Scalars of one batch.

    Attributes:
        total: What is minimised.
        actions: Cross entropy of the action tokens, weighted.
        places: Of the named object's patch.
        kinds: Of what the patches show.
        token_accuracy: Share of action tokens that are right.
        place_accuracy: Share of named objects whose patch is found.
    """

    total: Tensor
    actions: Tensor
    places: Tensor
    kinds: Tensor
    token_accuracy: Tensor
    place_accuracy: Tensor


def losses(predictions: Predictions, batch: Batch, recipe: FitRecipe) -> Losses:
    """All losses of a batch."""
    device = batch.tokens.device
    flat = functional.cross_entropy(predictions.actions.flatten(0, 1), batch.tokens.flatten(), reduction="none")
    weights = torch.tensor([1.0] * 3 + [recipe.rotation_weight] * 3 + [1.0], device=device)
    actions = (flat.view_as(batch.tokens) * weights).mean(0).sum() / weights.sum()
    # A frame in which the object does not show asks nothing; a batch without any must not divide by zero.
    asked = batch.places != NOT_ASKED
    missed = functional.cross_entropy(predictions.places, batch.places, ignore_index=NOT_ASKED, reduction="sum")
    places = missed / asked.sum().clamp(min=1)
    balance = torch.ones(len(KINDS) + 1, device=device)
    balance[-1] = recipe.background_weight
    kinds = functional.cross_entropy(predictions.kinds.flatten(0, 1), batch.kinds.flatten(), weight=balance)
    right = (predictions.actions.argmax(-1) == batch.tokens).float().mean()
    found = ((predictions.places.argmax(-1) == batch.places) & asked).sum() / asked.sum().clamp(min=1)
    total = actions + recipe.location_weight * places + recipe.kind_weight * kinds
    return Losses(total, actions, places, kinds, right, found)


def question(trainee: Trainee, batch: Batch, recipe: FitRecipe) -> Losses:
    """Forward pass and losses; what ``torch.compile`` gets."""
    return losses(trainee(batch.images, batch.prompts, batch.lengths, batch.tokens), batch, recipe)


@torch.no_grad()
def examine(
    trainee: Trainee, batch: Batch, prompts: int, reach: Tensor, bins: ActionBins, recipe: FitRecipe
) -> dict[str, float]:
    """What the network gets right, in figures that mean something.

    Args:
        trainee: The network.
        batch: Of held-out frames; the first of ``prompts`` instructions per frame was followed.
        prompts: Instructions per frame.
        reach: Float [3], metres per normalised unit of the translation.
        bins: Tokens to normalised values.
        recipe: Weights of the losses.
    """
    predictions = trainee(batch.images, batch.prompts, batch.lengths, batch.tokens)
    found = losses(predictions, batch, recipe)
    guessed = predictions.actions.argmax(-1)

    def metres(tokens: Tensor) -> Tensor:
        index = (bins.vocab_size - 1 - tokens[:, :3]).clamp(0, bins.count - 2)
        return (index + 0.5) * (2.0 / (bins.count - 1)) * reach

    error = (metres(guessed) - metres(batch.tokens)).abs()
    first = (torch.arange(len(guessed), device=guessed.device) % prompts) == 0
    opened = bins.vocab_size - (bins.count - 1)  # the token of gripper value 1
    gripper = ((guessed[:, 6] == opened) == (batch.tokens[:, 6] == opened)).float()
    figures = {
        "loss": found.total,
        "action_loss": found.actions,
        "token_accuracy": found.token_accuracy,
        "place_accuracy": found.place_accuracy,
        "error_mm_followed": 1e3 * error[first].mean(),
        "error_mm_others": 1e3 * error[~first].mean() if prompts > 1 else 1e3 * error.mean(),
        "gripper_accuracy": gripper.mean(),
    }
    return {name: round(float(value), 5) for name, value in figures.items()}
