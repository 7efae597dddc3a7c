"""A small pi0.5 for training: a differentiable forward pass of the policy's parameters, and two auxiliary heads."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tools.train.labels import KINDS
from tools.train.recipe import FlowNetworkRecipe
from vla_ros_models.engine.shapes import GeometryShape, TowerShape
from vla_ros_models.engine.training import Call
from vla_ros_models.pi import training as pi
from vla_ros_models.pi.architecture import PI05, PiArchitecture, gemma
from vla_ros_models.pi.network import PiNetwork
from vla_ros_models.pi.training import FlowBatch, FlowLossForm, PrefixCache, deviation_of
from vla_ros_models.training import draw_weights

STATE_SIZE = ACTION_SIZE = 8
"""Seven joints and the gripper."""


def architecture_of(
    recipe: FlowNetworkRecipe, vocabulary: int, horizon: int, image_size: int = 224, patch_size: int = 14
) -> PiArchitecture:
    """Return a pi0.5 with the recipe's sizes and :data:`ACTION_SIZE` action dimensions."""
    blocks, width = recipe.vision_blocks, recipe.vision_width
    heads = {"heads": recipe.heads, "head_dim": recipe.head_dim, "layers": recipe.depth}
    return PiArchitecture(
        PI05,
        TowerShape(width, blocks, recipe.vision_heads, 4 * width, blocks, patch_size, image_size),
        gemma(recipe.prefix_width, mlp_width=recipe.prefix_hidden, **heads),
        gemma(recipe.expert_width, mlp_width=recipe.expert_hidden, **heads),
        vocabulary,
        ACTION_SIZE,
        horizon,
        geometry=GeometryShape() if recipe.geometry else None,
    )


class FlowPredictions(NamedTuple):
    """Outputs of a forward pass; R = frames times prompts."""

    velocity: Tensor  # float32 [R * K, H, A], pointing from actions to noise
    places: Tensor  # logits of the patch that holds the named object [R, patches]
    kinds: Tensor  # logits of the object in each patch [F, patches, len(KINDS) + 1]; the last class is no object


class Encoded(NamedTuple):
    """Encoded images and prompts of R rows, which all samples of a chunk share."""

    batch: FlowBatch
    prefix: PrefixCache
    patches: Tensor  # [F, P, width], of the images
    last: Tensor  # [R, width], the last token of each prompt before the last layer


class FlowTrainee(pi.FlowTrainee):
    """The network with its two auxiliary heads."""

    def __init__(self, architecture: PiArchitecture) -> None:
        super().__init__(PiNetwork(architecture), FlowLossForm(architecture.action_dim))
        self.architecture = architecture
        width = architecture.prefix.hidden_size
        self.place_head = nn.Linear(width, architecture.vision.patches)
        self.kind_head = nn.Linear(width, len(KINDS) + 1)

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        prompts: Tensor,
        lengths: Tensor | None,
        noisy: Tensor,
        times: Tensor,
        positions: Tensor | None = None,
    ) -> FlowPredictions:
        """Predict the velocity of noisy actions.

        Args:
            images: [F, S, S, 3] RGB, uint8, or float in [0, 1]; [F, cameras, S, S, 3] of several cameras.
            prompts: Int64 [R, L], padded; R / F consecutive rows belong to one frame.
            lengths: Int64 [R], number of tokens of each prompt; None if no prompt is padded.
            noisy: Float32 [R * K, H, A], normalised actions at ``times``; K consecutive samples share a prompt.
            times: Float32 [R * K, H], 1 for noise, 0 for actions, including actions given by real-time chunking.
            positions: Float32 [F, patches, 3] or [F, cameras, patches, 3], metres, NaN where unknown; for a network
                with geometric tokens.
        """
        found = self.encode(images, prompts, lengths, positions)
        velocity = self.velocity(found, noisy, times)
        return FlowPredictions(velocity, self.place_head(found.last).float(), self.kind_head(found.patches).float())

    def encode(
        self, images: Tensor, prompts: Tensor, lengths: Tensor | None, positions: Tensor | None = None
    ) -> Encoded:
        """Encode images and prompts, once for all samples of a chunk."""
        images = images if images.ndim == 5 else images[:, None]
        valid = torch.ones_like(prompts, dtype=torch.bool)
        if lengths is not None:
            valid = torch.arange(prompts.shape[1], device=valid.device) < lengths[:, None]
        seen = valid.new_ones(len(prompts), images.shape[1])
        none = torch.zeros(len(prompts), 1, 1, device=prompts.device)
        self._frames, self._prompts = len(images), len(prompts) // len(images)
        if positions is not None:
            positions = positions if positions.ndim == 4 else positions[:, None]
            positions = positions.repeat_interleave(self._prompts, dim=0)
        batch = FlowBatch(
            images, seen, prompts, valid, none[..., 0], none, valid[:, :1], none, none[:, 0, 0], positions
        )
        prefix, rows = self.run_prefix(batch)
        ends = prefix.valid.sum(1)
        last = rows.gather(1, (ends - 1)[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]
        return Encoded(batch, prefix, self._seen, last)

    def _patches(self, images: Tensor, run: Call) -> Tensor:
        """Embed F * cameras images; the prompts of a frame share them: [R * cameras, patches, width]."""
        patches = super()._patches(images, run)
        self._seen = patches.reshape(self._frames, -1, patches.shape[-1])  # [F, cameras * patches, width]
        return self._seen.repeat_interleave(self._prompts, dim=0)

    def velocity(self, found: Encoded, noisy: Tensor, times: Tensor) -> Tensor:
        """Return the velocities, float32 [R * K, H, A]; within a sample, times are equal or 0."""
        samples = len(noisy) // len(found.last)
        prefix = found.prefix.each(lambda part: part.repeat_interleave(samples, dim=0))
        batch = replace(found.batch, noise=noisy)
        return self.predict(batch, prefix, noisy, times.amax(1), given=times == 0)

    @torch.no_grad()
    def sample(self, found: Encoded, noise: Tensor, steps: int) -> Tensor:
        """Return the actions [R, H, A] from ``noise`` by Euler's method."""
        actions = noise
        for step in range(steps):
            times = torch.full(noise.shape[:2], 1 - step / steps, device=noise.device)
            actions = actions - self.velocity(found, actions, times) / steps
        return actions


def initialize(trainee: FlowTrainee, seed: int) -> None:
    """Draw the weights of the network and of its heads."""
    draw_weights(trainee, partial(deviation_of, trainee.architecture), seed)
