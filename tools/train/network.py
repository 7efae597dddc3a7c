"""The small OpenVLA for training: the policy's modules and two auxiliary heads."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tools.checkpoints.vocabulary import PROMPT_WORDS, TABLE_WORDS, word_ids
from tools.train.labels import KINDS
from tools.train.recipe import NetworkRecipe
from vla_ros_models.engine.shapes import IMAGENET_MEAN, IMAGENET_STD, DecoderShape, TowerShape
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.openvla.network import OpenVLAModel
from vla_ros_models.openvla.training import deviation_of
from vla_ros_models.training import draw_weights

ACTION_TOKENS = 7
BINS = 256
PADDING = 64
EMPTY_TOKEN = 440
"""Token that ends every prompt; above the word tokens, below the action tokens."""
VOCABULARY = 768 - PADDING
"""Number of tokens without padding: special tokens, bytes, words, the empty token, and the actions at the end."""


def token_ids() -> dict[str, int]:
    return word_ids((*PROMPT_WORDS, *TABLE_WORDS), EMPTY_TOKEN)


def architecture_of(recipe: NetworkRecipe) -> Architecture:
    """Return a small OpenVLA: both vision towers, fused projector, Llama decoder."""
    towers = tuple(
        TowerShape(
            width=recipe.vision_width,
            blocks=recipe.vision_blocks + 1,
            heads=recipe.vision_heads,
            mlp_width=4 * recipe.vision_width,
            used_blocks=recipe.vision_blocks,
            class_token=dino,
            register_tokens=4 if dino else 0,
            layer_scale=dino,
            mean=IMAGENET_MEAN if dino else (0.5, 0.5, 0.5),
            std=IMAGENET_STD if dino else (0.5, 0.5, 0.5),
        )
        for dino in (True, False)
    )
    llm = DecoderShape(
        vocab_size=VOCABULARY + PADDING,
        hidden_size=recipe.llm_width,
        intermediate_size=recipe.llm_hidden,
        layers=recipe.llm_layers,
        heads=recipe.llm_heads,
        kv_heads=recipe.llm_heads,
        head_dim=recipe.llm_width // recipe.llm_heads,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_positions=512,
        bos_token=1,
    )
    return Architecture(
        towers=towers,
        llm=llm,
        action_vocab_size=VOCABULARY,
        action_bins=BINS,
        empty_token=EMPTY_TOKEN,
        prompt_version="v0.2",
    )


class Predictions(NamedTuple):
    """Outputs of a forward pass; R = frames times prompts."""

    actions: Tensor  # logits of the action tokens [R, 7, vocab_size]
    places: Tensor  # logits of the patch that holds the named object [R, patches]
    kinds: Tensor  # logits of the object in each patch [F, patches, len(KINDS) + 1]; the last class is no object


class Trainee(nn.Module):
    """The network with its two auxiliary heads."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.model = OpenVLAModel(architecture)
        width = architecture.llm.hidden_size
        self.place_head = nn.Linear(width, architecture.patches)
        self.kind_head = nn.Linear(width, len(KINDS) + 1)
        self.patches = architecture.patches

    def forward(self, images: Tensor, prompts: Tensor, lengths: Tensor, tokens: Tensor) -> Predictions:
        """Predict all action tokens at once with teacher forcing.

        Args:
            images: [F, H, W, 3] RGB in 0 to 255, uint8 or float.
            prompts: Int64 [R, L], padded; R / F consecutive rows belong to one frame.
            lengths: Int64 [R], number of tokens of each prompt.
            tokens: Int64 [R, 7], the action tokens.
        """
        patches = self.model.embed_image(self.model.normalize(images))  # [F, patches, width]
        kinds = self.kind_head(patches)
        repeated = patches.repeat_interleave(prompts.shape[0] // images.shape[0], dim=0)
        hidden = self.model.hidden_states(
            self.model.embed_sequence(repeated, with_actions(prompts, lengths, tokens))
        )
        # Position patches + i predicts input_ids[i + 1]; padding follows the tokens that count.
        first = self.patches + lengths - 1
        where = first[:, None] + torch.arange(ACTION_TOKENS, device=first.device)
        chosen = hidden.gather(1, where[..., None].expand(-1, -1, hidden.shape[-1]))  # [R, 7, width]
        logits: Tensor = self.model.language_model.lm_head(chosen)
        return Predictions(logits.float(), self.place_head(chosen[:, 0]).float(), kinds.float())


def with_actions(prompts: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
    """Append the first six action tokens to each prompt [R, L]; returns int64 [R, L + 6]."""
    room = torch.zeros(prompts.shape[0], ACTION_TOKENS - 1, dtype=prompts.dtype, device=prompts.device)
    where = lengths[:, None] + torch.arange(ACTION_TOKENS - 1, device=lengths.device)
    return torch.cat([prompts, room], dim=1).scatter(1, where, tokens[:, :-1])


def initialize(trainee: Trainee, seed: int) -> None:
    """Draw the weights of the network and of its heads."""
    draw_weights(trainee, partial(deviation_of, trainee.model.architecture), seed)
