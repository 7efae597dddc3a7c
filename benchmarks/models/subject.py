"""Models to measure: a checkpoint, a tiny model, or OpenVLA-7B's architecture with random weights."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.checkpoints.tiny import STATISTICS, write_tiny
from vla_ros.types import IntArray
from vla_ros_models.checkpoint_files import Produce, checkpoint_folder, from_files, read_manifest
from vla_ros_models.engine.shapes import TIMM_TOWERS, DecoderShape
from vla_ros_models.engine.weights import DecoderWeights
from vla_ros_models.openvla.architecture import Architecture, read_architecture
from vla_ros_models.openvla.loading import build_empty, check_weights, fill_quantized
from vla_ros_models.openvla.network import OpenVLAModel
from vla_ros_models.openvla.processing import ActionBins, ActionStatistics, read_dataset_statistics
from vla_ros_models.weights import fill

OPENVLA_7B = Architecture(
    towers=tuple(TIMM_TOWERS.values()),
    llm=DecoderShape(
        vocab_size=32064,
        hidden_size=4096,
        intermediate_size=11008,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_positions=2048,
        bos_token=1,
    ),
    action_vocab_size=32000,
    action_bins=256,
    empty_token=29871,
    prompt_version="v0.2",
)
"""Sizes of the published checkpoint."""


@dataclass(frozen=True)
class Subject:
    """The model to measure."""

    name: str  # for the report
    model: OpenVLAModel  # the reference network, loaded
    bins: ActionBins  # its action tokens
    statistics: ActionStatistics  # un-normalisation
    random: bool  # True for random weights: times are meaningful, tokens and acceptance are not
    # The decoder if it was quantised during loading; ``model`` then has no layers.
    weights: DecoderWeights | None = None


def open_subject(name: str, device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Subject:
    """Load or create the model: ``tiny``, ``openvla-7b`` or a checkpoint folder.

    With a ``quantization`` it is quantised while loading; the dense decoder never exists in full.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if name == "openvla-7b":
            architecture, known = OPENVLA_7B, None
            title, statistics = "openvla-7b (random weights)", _random_statistics()
        else:
            folder = Path(scratch) if name == "tiny" else checkpoint_folder(name)
            if name == "tiny":
                write_tiny(folder)
            architecture, known = read_architecture(folder), read_manifest(folder)
            title = "tiny (random weights)" if name == "tiny" else folder.name
            statistics = next(iter(read_dataset_statistics(folder).values()))
        model, weights = build_empty(architecture), None
        if known is not None:
            check_weights(model, known, folder)
        produce = random_weights(model, device, dtype) if known is None else from_files(known)
        if quantization == "none":
            fill(model, produce, device, dtype)
        else:
            weights = fill_quantized(model, produce, device, dtype, quantization)
    bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
    return Subject(title, model, bins, statistics, name in ("tiny", "openvla-7b"), weights)


def random_model(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> OpenVLAModel:
    model = build_empty(architecture)
    fill(model, random_weights(model, device, dtype), device, dtype)
    return model


def random_weights(model: OpenVLAModel, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Produce:
    """Return a function that makes random weights on the device, scaled so that no signal vanishes."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            noise = torch.randn(shapes[name], generator=generator, device=device, dtype=dtype)
            yield name, _scaled(name, noise)

    return produce


def _scaled(name: str, noise: Tensor) -> Tensor:
    if name.endswith("scale_factor"):
        return noise.mul_(0.1).add_(0.5)
    if "norm" in name and name.endswith("weight"):
        return noise.mul_(0.1).add_(1.0)
    if name.endswith(("bias", "pos_embed", "cls_token", "reg_token")):
        return noise.mul_(0.1)
    if name.endswith("embed_tokens.weight"):
        return noise
    return noise.mul_(1.5 / noise[0].numel() ** 0.5)


def _random_statistics() -> ActionStatistics:
    action = STATISTICS["tiny"]["action"]
    low, high = (np.asarray(action[name], dtype=np.float64) for name in ("q01", "q99"))
    return ActionStatistics("random", low, high, np.asarray(action["mask"], dtype=np.bool_))


def make_prompt(architecture: Architecture, tokens: int, seed: int = 0) -> IntArray:
    """Make a prompt of BOS, random tokens and the closing token: int64 [tokens]."""
    words = np.random.default_rng(seed).integers(3, architecture.action_vocab_size // 2, max(1, tokens - 2))
    return np.array([architecture.llm.bos_token, *words, architecture.empty_token], dtype=np.int64)
