"""What is measured: a checkpoint, a tiny one, or the whole OpenVLA-7B architecture with random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import MissingDependencyError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.openvla.actions import ActionBins, ActionStatistics, read_statistics
from vla_ros.policies.openvla.architecture import TIMM_TOWERS, Architecture, LlmShape, read_architecture
from vla_ros.policies.openvla.fast import fill_quantized, from_files
from vla_ros.policies.openvla.loading import (
    build_empty,
    check_weights,
    checkpoint_folder,
    fill,
    place,
    read_manifest,
)
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.tiny import STATISTICS, write_tiny

OPENVLA_7B = Architecture(
    towers=tuple(TIMM_TOWERS.values()),
    llm=LlmShape(
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

_RANDOM_7B = "openvla-7b (random weights)"
_TINY = "tiny (random weights)"


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        name: For the report.
        model: The reference network, loaded.
        bins: Its action tokens.
        statistics: Un-normalisation.
        random: True where the weights are made up: speed is meant then, tokens and acceptance mean nothing.
        weights: The decoder where it was quantised while it was loaded; ``model`` has no layers then.
    """

    name: str
    model: OpenVLAModel
    bins: ActionBins
    statistics: ActionStatistics
    random: bool
    weights: DecoderWeights | None = None


def open_quantized(name: str, device: torch.device, dtype: torch.dtype, quantization: str) -> Subject:
    """As :func:`open_subject`, quantised while it is loaded: the dense decoder is never there as a whole."""
    if name == "openvla-7b":
        model, weights = random_quantized(OPENVLA_7B, device, dtype, quantization)
        return Subject(_RANDOM_7B, model, ActionBins(32000), _random_statistics(), True, weights)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if name == "tiny" else checkpoint_folder(name)
        if name == "tiny":
            write_tiny(folder)
        architecture, manifest = read_architecture(folder), read_manifest(folder)
        model = build_empty(architecture)
        check_weights(model, manifest, folder)
        weights = fill_quantized(model, from_files(manifest), device, dtype, quantization)
        bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
        statistics = next(iter(read_statistics(folder).values()))
    return Subject(_TINY if name == "tiny" else folder.name, model, bins, statistics, name == "tiny", weights)


def open_subject(name: str, device: torch.device, dtype: torch.dtype, progress: Progress = no_progress) -> Subject:
    """Load or make the model.

    Args:
        name: ``tiny``, ``openvla-7b`` or a checkpoint's folder.
        device: Where it goes.
        dtype: Type of its weights.
        progress: Told how far it has come.

    Raises:
        CheckpointError: The folder is missing or damaged.
    """
    if name == "openvla-7b":
        model = random_model(OPENVLA_7B, device, dtype, progress=progress)
        return Subject(_RANDOM_7B, model, ActionBins(32000), _random_statistics(), True)
    if name == "tiny":
        with tempfile.TemporaryDirectory() as scratch:
            write_tiny(scratch)
            return _read(Path(scratch), _TINY, device, dtype, True, progress)
    folder = checkpoint_folder(name)
    return _read(folder, folder.name, device, dtype, False, progress)


def random_model(
    architecture: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    progress: Progress = no_progress,
) -> OpenVLAModel:
    """The network with random weights made on the device, scaled so that no signal dies on the way."""
    model = build_empty(architecture)
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for index, (name, shape) in enumerate(shapes.items()):
        noise = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        place(model, name, _scaled(name, noise), device, dtype)
        progress((index + 1) / len(shapes), f"making {name}")
    model.to(device)
    return model


def random_quantized(
    architecture: Architecture, device: torch.device, dtype: torch.dtype, quantization: str, seed: int = 0
) -> tuple[OpenVLAModel, DecoderWeights]:
    """As :func:`random_model`, quantised layer by layer, as a checkpoint is loaded."""
    model = build_empty(architecture)
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def produce(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            noise = torch.randn(shapes[name], generator=generator, device=device, dtype=dtype)
            yield name, _scaled(name, noise)

    return model, fill_quantized(model, produce, device, dtype, quantization)


def eager_baseline(model: OpenVLAModel) -> Any:
    """Llama of transformers over the weights of ``model``, whose ``generate`` is what users run.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError as error:
        raise MissingDependencyError("the baseline needs transformers: pip install 'vla_ros[bench]'") from error
    llm = model.architecture.llm
    config = LlamaConfig(
        vocab_size=llm.vocab_size,
        hidden_size=llm.hidden_size,
        intermediate_size=llm.intermediate_size,
        num_hidden_layers=llm.layers,
        num_attention_heads=llm.heads,
        num_key_value_heads=llm.kv_heads,
        head_dim=llm.head_dim,
        rms_norm_eps=llm.rms_norm_eps,
        max_position_embeddings=llm.max_positions,
        rope_theta=llm.rope_theta,  # as versions before 5 name it
        rope_parameters={"rope_type": "default", "rope_theta": llm.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
        dtype=model.dtype,
    )
    with torch.device("meta"):
        plain = LlamaForCausalLM(config)
    weights: dict[str, Tensor] = {
        f"model.{name}": value for name, value in model.language_model.model.named_parameters()
    }
    weights["lm_head.weight"] = model.language_model.lm_head.weight
    plain.load_state_dict(weights, assign=True, strict=True)
    plain.model.rotary_emb = LlamaRotaryEmbedding(config).to(model.device)  # its table is no weight
    return plain.eval()


def _read(
    folder: Path, name: str, device: torch.device, dtype: torch.dtype, random: bool, progress: Progress
) -> Subject:
    architecture = read_architecture(folder)
    model, manifest = build_empty(architecture), read_manifest(folder)
    check_weights(model, manifest, folder)
    fill(model, manifest, device, dtype, progress)
    statistics = next(iter(read_statistics(folder).values()))
    bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
    return Subject(name, model, bins, statistics, random)


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
