"""Writes a small random checkpoint in the published layout, for tests and benchmarks.

Its actions are meaningless, but depend on image and instruction, as with a real checkpoint.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tools.checkpoints.openvla import Statistics, write_checkpoint
from tools.checkpoints.vocabulary import PROMPT_WORDS, TABLE_WORDS, word_ids
from vla_ros_models.engine.shapes import IMAGENET_MEAN, IMAGENET_STD, DecoderShape, TowerShape
from vla_ros_models.openvla.architecture import LLAMA2_EMPTY_TOKEN, Architecture
from vla_ros_models.openvla.loading import build_empty

STATISTICS: Statistics = {
    "tiny": {
        "action": {
            "mask": [True, True, True, True, True, True, False],
            "q01": [-0.02, -0.02, -0.02, -0.05, -0.05, -0.05, 0.0],
            "q99": [0.02, 0.02, 0.02, 0.05, 0.05, 0.05, 1.0],
        }
    }
}
"""Limits each step of a random model to 2 cm and 0.05 rad."""


def tiny_architecture(
    vision_width: int = 32,
    vision_blocks: int = 3,
    vision_heads: int = 2,
    llm_width: int = 64,
    llm_layers: int = 2,
    llm_heads: int = 4,
    vocabulary: int = 32000,
    padding: int = 64,
    empty_token: int = LLAMA2_EMPTY_TOKEN,
    prompt_version: str = "v0.2",
) -> Architecture:
    """Return the sizes of a small model with both kinds of vision tower.

    Each tower stores ``vision_blocks`` blocks and runs all but the last. ``vocabulary`` is the number of
    tokens without ``padding``; the last 255 are action tokens. ``empty_token`` closes a prompt.
    """
    siglip = TowerShape(
        width=vision_width,
        blocks=vision_blocks,
        heads=vision_heads,
        mlp_width=4 * vision_width,
        used_blocks=vision_blocks - 1,
    )
    dino = replace(
        siglip, class_token=True, register_tokens=4, layer_scale=True, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
    llm = DecoderShape(
        vocab_size=vocabulary + padding,
        hidden_size=llm_width,
        intermediate_size=2 * llm_width,
        layers=llm_layers,
        heads=llm_heads,
        kv_heads=llm_heads,
        head_dim=llm_width // llm_heads,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_positions=2048,
        bos_token=1,
    )
    return Architecture(
        towers=(dino, siglip),
        llm=llm,
        action_vocab_size=vocabulary,
        action_bins=256,
        empty_token=empty_token,
        prompt_version=prompt_version,
    )


def random_weights(architecture: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Return random float32 weights for every parameter, scaled so that signals do not vanish."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in build_empty(architecture).named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("scale_factor"):
            weights[name] = 0.5 + 0.1 * noise
        elif "norm" in name and name.endswith("weight"):
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith(("bias", "pos_embed", "cls_token", "reg_token")):
            weights[name] = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            weights[name] = noise
        else:
            # Attention is sharp, with large outputs; otherwise only the prompt's last token would matter.
            gain = 4.5 if name.endswith(("q_proj.weight", "o_proj.weight")) else 1.5
            weights[name] = noise * (gain / parameter[0].numel() ** 0.5)
    head = weights["language_model.lm_head.weight"]
    first = architecture.action_vocab_size - architecture.action_bins + 1
    head[:first] *= 0.2  # action tokens should win, as they do after training
    head[architecture.action_vocab_size :] *= 0.2
    return weights


def write_tiny(
    folder: Path | str,
    seed: int = 0,
    architecture: Architecture | None = None,
    statistics: Statistics = STATISTICS,
    shards: int = 2,
) -> Architecture:
    """Write a random checkpoint to ``folder`` and return its sizes."""
    architecture = architecture or tiny_architecture()
    ids = word_ids((*PROMPT_WORDS, *TABLE_WORDS), architecture.empty_token)
    write_checkpoint(Path(folder), architecture, random_weights(architecture, seed), statistics, ids, shards)
    return architecture
