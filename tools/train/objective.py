"""The loss: action tokens, and two auxiliary losses that ground the instruction in the image.

Cross entropy on the actions is already low for a network that grasps *something*, because few frames depend on the
instruction. The auxiliary heads predict the patch of the named object and the object in each patch; the exported
policy does not have these heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tools.train.batches import NOT_ASKED, Batch
from tools.train.network import Predictions, Trainee
from tools.train.recipe import FitRecipe
from vla_ros_models.openvla.processing import ActionBins


class Losses(NamedTuple):
    """Scalar losses and accuracies of one batch."""

    total: Tensor  # the loss to minimise
    actions: Tensor  # weighted cross entropy of the action tokens
    places: Tensor  # cross entropy of the named object's patch
    kinds: Tensor  # cross entropy of the object in each patch
    token_accuracy: Tensor  # share of correct action tokens
    place_accuracy: Tensor  # share of named objects whose patch is correct


def losses(predictions: Predictions, batch: Batch, recipe: FitRecipe) -> Losses:
    device = batch.tokens.device
    flat = functional.cross_entropy(predictions.actions.flatten(0, 1), batch.tokens.flatten(), reduction="none")
    weights = torch.tensor([1.0] * 3 + [recipe.rotation_weight] * 3 + [1.0], device=device)
    actions = (flat.view_as(batch.tokens) * weights).mean(0).sum() / weights.sum()
    places, found = place_loss(predictions.places, batch.places)
    kinds = kind_loss(predictions.kinds, batch.kinds, recipe)
    right = (predictions.actions.argmax(-1) == batch.tokens).float().mean()
    total = actions + recipe.location_weight * places + recipe.kind_weight * kinds
    return Losses(total, actions, places, kinds, right, found)


def place_loss(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss on the named objects' patches, and the share found; a batch may have no visible object."""
    visible = (places != NOT_ASKED).sum().clamp(min=1)
    missed = functional.cross_entropy(logits, places, ignore_index=NOT_ASKED, reduction="sum")
    return missed / visible, (logits.argmax(-1) == places).sum() / visible


def kind_loss(logits: Tensor, kinds: Tensor, recipe: FitRecipe) -> Tensor:
    """Return the loss on the object in each patch; the last class is no object."""
    balance = torch.ones(logits.shape[-1], device=logits.device)
    balance[-1] = recipe.background_weight
    return functional.cross_entropy(logits.flatten(0, 1), kinds.flatten(), weight=balance)


def step_losses(trainee: Trainee, batch: Batch, recipe: FitRecipe) -> Losses:
    """Run the forward pass and return the losses; one function, so that it can be compiled."""
    return losses(trainee(batch.images, batch.prompts, batch.lengths, batch.tokens), batch, recipe)


@torch.no_grad()
def evaluate_batch(
    trainee: Trainee, batch: Batch, prompts: int, reach: Tensor, bins: ActionBins, recipe: FitRecipe
) -> dict[str, float]:
    """Return the accuracy and errors in millimetres on a held-out batch.

    Of the ``prompts`` instructions per frame, the arm followed the first; ``reach`` [3] is metres per normalised
    unit.
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
