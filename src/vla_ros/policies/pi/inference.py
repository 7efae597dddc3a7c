"""A loaded model: images, state, instruction and noise in; one chunk out, normalised and in the robot's units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.pi.checkpoint import PiCheckpoint
from vla_ros.policies.pi.flow import Flow, Guidance, Inpainting, make_flow, sample_actions
from vla_ros.policies.pi.loading import build_empty, check_weights, fill
from vla_ros.policies.pi.memory import check_memory, plan_memory
from vla_ros.policies.pi.network import PiNetwork, PrefixInput
from vla_ros.policies.pi.normalization import Array
from vla_ros.policies.pi.processing import Processing, pad_state
from vla_ros.policies.pi.rtc import RealTimeChunk, check_chunk, padded, prefix_weights
from vla_ros.policies.pi.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from vla_ros.policies.pi.vision_tower import as_pixels
from vla_ros.types import IntArray, UInt8Array


@dataclass(frozen=True, eq=False)
class Chunk:
    """One answer.

    Attributes:
        normalized: Float32 [H, action_dim], the end of the flow. Real-time chunking continues this.
        actions: Float [H, action_size] in the robot's units.
        tokens: Int64 [L] of the prompt, without padding.
        state: Float [state_size], normalised.
    """

    normalized: Array
    actions: Array
    tokens: IntArray
    state: Array


@dataclass(frozen=True, eq=False)
class PiModel:
    """A loaded model. Stateless between calls.

    Attributes:
        network: With weights, on its device.
        flow: Constants of the flow steps.
        processing: Of inputs and actions.
        tokenizer: Text to ids.
        trained_delay: Longest delay of trained real-time chunking.
    """

    network: PiNetwork
    flow: Flow
    processing: Processing
    tokenizer: Tokenizer
    trained_delay: int = 0

    def infer(
        self,
        images: Mapping[str, UInt8Array],
        state: Array,
        instruction: str,
        noise: Array,
        rtc: RealTimeChunk | None = None,
    ) -> Chunk:
        """Compute one chunk.

        Args:
            images: Key to uint8 [H, W, 3] RGB, upright; optional ones may be missing.
            state: Float [state_size] in the robot's units.
            instruction: The command in natural language.
            noise: Float [H, action_dim], standard normal; the same noise gives the same chunk.
            rtc: What is left of the previous chunk, or None.

        Raises:
            ConfigError: State, instruction, noise or ``rtc`` do not fit the model.
            ImageError: An image is missing or unknown, or an array is not an image.
            VlaRosError: The chunk holds NaN or Inf.
        """
        architecture, device = self.network.architecture, self.network.device
        size = (architecture.horizon, architecture.action_dim)
        if noise.shape != size:
            raise ConfigError(f"the noise has shape {list(noise.shape)}, expected {list(size)}")
        resized = self.processing.resized_images(images, architecture.vision.image_size)
        normalized = self.processing.normalized_state(state)
        tokens = self.processing.tokens(self.tokenizer.encode, instruction, normalized)
        inputs = PrefixInput(
            pixels=as_pixels(torch.from_numpy(resized).to(device))[None],
            tokens=torch.from_numpy(tokens).to(device)[None],
            state=_batch(pad_state(normalized, architecture.action_dim), device),
        )
        sampled = sample_actions(self.network, self.flow, inputs, _batch(noise, device), self._continuation(rtc))
        chunk = sampled[0].cpu().numpy()
        if not np.isfinite(chunk).all():
            raise VlaRosError(f"{architecture.model}: the chunk holds NaN or Inf; the frame is dropped")
        return Chunk(chunk, self.processing.robot_actions(chunk, state), tokens, normalized)

    def _continuation(self, rtc: RealTimeChunk | None) -> Guidance | Inpainting | None:
        if rtc is None:
            return None
        architecture, device = self.network.architecture, self.network.device
        check_chunk(rtc, architecture.horizon, architecture.action_dim, self.trained_delay)
        previous = _batch(padded(rtc.previous, architecture.horizon, architecture.action_dim), device)
        if rtc.mode == "trained":
            given = torch.arange(architecture.horizon, device=device) < rtc.delay
            return Inpainting(previous, given[None, :, None])
        weights = _batch(prefix_weights(rtc, architecture.horizon)[:, None], device)
        return Guidance(previous, weights, rtc.max_guidance_weight)


def load_model(
    checkpoint: PiCheckpoint,
    device: str = "cpu",
    dtype: str = "float32",
    flow_steps: int | None = None,
    tokenizer: Path | None = None,
    progress: Progress = no_progress,
) -> PiModel:
    """Load a checkpoint onto a device.

    Args:
        checkpoint: From :func:`~vla_ros.policies.pi.checkpoint.read_checkpoint`.
        device: ``cpu`` or ``cuda...``.
        dtype: ``float32`` or ``bfloat16``, for the matrices.
        flow_steps: Euler steps; None for the checkpoint's.
        tokenizer: File or folder of the tokenizer; None looks in the checkpoint.
        progress: Called with the share that is loaded.

    Raises:
        CheckpointError: Tensors or tokenizer are missing or do not fit.
        ConfigError: ``flow_steps`` is out of range.
        OutOfMemoryError: The model does not fit; raised before anything is loaded.
    """
    architecture = checkpoint.architecture
    steps = checkpoint.flow_steps if flow_steps is None else flow_steps
    if steps < 1:
        raise ConfigError(f"flow steps: found {steps}, expected at least 1")
    parts = check_weights(architecture, checkpoint.stored, checkpoint.folder)
    words = load_tokenizer(find_tokenizer(checkpoint.folder, tokenizer), architecture.vocabulary)
    cameras = len(checkpoint.processing.images)
    plan = partial(plan_memory, parts, architecture, device=device, cameras=cameras, flow_steps=steps)
    progress(0.0, check_memory(plan, dtype, device))
    network = build_empty(architecture)
    fill(network, parts, checkpoint.stored, torch.device(device), getattr(torch, dtype), progress)
    flow = make_flow(network, steps, checkpoint.processing.summed_times)
    return PiModel(network, flow, checkpoint.processing, words, checkpoint.trained_delay)


def _batch(values: Array, device: torch.device) -> Tensor:
    """Float32 with a leading 1."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(device)[None]
