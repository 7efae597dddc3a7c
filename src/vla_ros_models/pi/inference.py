"""Loads a model, prepares observations for its engine, and continues chunks in real time.

Real-time chunking: with *guided* (any checkpoint), each flow step pulls the chunk towards the rest of the previous
chunk in proportion to the error, as in LeRobot. *jacobian* does the same along the gradient of the squared error,
as in the paper (arXiv 2506.07339). With *trained* (pi0.5 checkpoints trained for it), the first actions are fixed
to the previous ones, and their time is 0 in every step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vla_ros.errors import ConfigError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import FloatArray, IntArray, RawImage, UInt8Array
from vla_ros_models.engine.device_ops import make_ops, make_tower_ops
from vla_ros_models.engine.flow_engine import Continuation, FlowEngine, FlowRequest
from vla_ros_models.engine.kernel_check import checked
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.runner import Runner
from vla_ros_models.normalization import Array
from vla_ros_models.pi.architecture import PiArchitecture
from vla_ros_models.pi.checkpoint import PiCheckpoint
from vla_ros_models.pi.loading import PI_TENSORS, fill_network
from vla_ros_models.pi.network import PiNetwork, build_empty, make_flow
from vla_ros_models.pi.processing import Processing, find_tokenizer, load_tokenizer, pad_state
from vla_ros_models.sampling import check_noise
from vla_ros_models.tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class RealTimeChunk:
    """The rest of the previous chunk, and how the new chunk continues it."""

    previous: Array  # float [T, A], normalised: the T actions not executed yet, A numbers each
    delay: int  # d, actions that will have been executed when the new chunk arrives
    mode: str = "guided"  # one of :data:`~vla_ros_models.pi.MODES`
    execution_horizon: int = 10  # action at which guidance ends, at most T; unused if trained
    schedule: str = "LINEAR"  # how the weight falls between ``delay`` and the end
    max_guidance_weight: float = 10.0  # maximum factor of the correction

    def continuation(self, horizon: int, numbers: int, max_delay: int) -> Continuation:
        """Return the engine's input for chunks [horizon, numbers].

        ``max_delay`` is the longest delay in the checkpoint's training; 0 if it was not trained to continue chunks.
        Raises ConfigError if the model cannot continue the previous chunk.
        """
        shape, is_trained = self.previous.shape, self.mode == "trained"
        if len(shape) != 2 or not 1 <= shape[0] <= horizon or not 1 <= shape[1] <= numbers:
            raise ConfigError(
                f"RTC: the previous actions have shape {list(shape)}, expected [1 to {horizon}, 1 to {numbers}]"
            )
        if not np.isfinite(self.previous).all():
            raise ConfigError("RTC: the previous actions contain NaN or Inf")
        limit = min(max_delay, shape[0], horizon - 1) if is_trained else horizon
        if not 0 <= self.delay <= limit:
            trained = f" (the checkpoint was trained for at most {max_delay})" if is_trained else ""
            raise ConfigError(f"RTC: a delay of {self.delay} actions, expected 0 to {limit}{trained}")
        # Padding is 0, the mean of the data.
        previous = np.pad(self.previous, [(0, horizon - shape[0]), (0, numbers - shape[1])])
        if is_trained:
            return Continuation(previous, np.zeros(horizon), given=self.delay)
        return Continuation(previous, prefix_weights(self, horizon), self.max_guidance_weight)


def prefix_weights(rtc: RealTimeChunk, horizon: int) -> FloatArray:
    """Return the weights of the guidance, float64 [H]: 1 follows the previous action, 0 ignores it."""
    end = min(rtc.execution_horizon, len(rtc.previous), horizon)
    start = min(rtc.delay, end)
    weights = np.zeros(horizon)
    weights[:start] = 1.0
    if rtc.schedule == "ONES":
        weights[:end] = 1.0
    elif rtc.schedule in ("LINEAR", "EXP"):
        falling = np.linspace(1.0, 0.0, end - start + 2)[1:-1]
        weights[start:end] = falling * np.expm1(falling) / (math.e - 1) if rtc.schedule == "EXP" else falling
    return weights


@dataclass(frozen=True, eq=False)
class PiModel:
    """A loaded model, which keeps no state between calls."""

    architecture: PiArchitecture  # sizes
    engine: FlowEngine  # runs the network
    processing: Processing  # converts inputs and actions
    tokenizer: Tokenizer  # text to ids
    trained_delay: int = 0  # longest delay of trained real-time chunking

    @property
    def longest(self) -> int:
        """Largest number of tokens in a prompt."""
        return self.processing.prompt.length

    def request(
        self,
        images: Mapping[str, UInt8Array | RawImage],
        state: Array,
        instruction: str,
        noise: Array | int,
        rtc: RealTimeChunk | None = None,
    ) -> FlowRequest:
        """Prepare one observation for the engine.

        ``images`` maps keys to upright RGB images, uint8 [H, W, 3], or to raw images; optional images may be
        missing. ``state`` is float [state_size] in the robot's units. ``noise`` is standard normal, float [horizon,
        action_dim], or a seed; the same noise gives the same chunk. ``rtc`` is the rest of the previous chunk, or
        None.
        """
        sizes = self.architecture
        check_noise(noise, sizes.horizon, sizes.action_dim)
        prepared = self.processing.prepared_images(images, sizes.vision.image_size)
        normalized = self.processing.normalized_state(state)
        tokens = self._tokens(instruction, normalized, len(prepared))
        follow = None if rtc is None else rtc.continuation(sizes.horizon, sizes.action_dim, self.trained_delay)
        return FlowRequest(prepared, tokens, pad_state(normalized, self.engine.model.state_dim), noise, follow)

    def _tokens(self, instruction: str, state: Array, images: int) -> IntArray:
        """Return the prompt's tokens; ``images`` are present."""
        return self.processing.tokens(self.tokenizer.encode, instruction, state)


def make_engine(
    network: PiNetwork,
    processing: Processing,
    steps: int,
    runner: Runner | None = None,
    quantization: str = "none",
    ops: Ops | None = None,
    keep: bool = True,
    jacobian: bool = False,
) -> FlowEngine:
    """Return an engine that runs a loaded ``network``.

    ``quantization`` of the prefix is ``none`` or ``fp8``; without ``keep``, each parameter is freed once it is
    quantised. ``runner`` and ``ops`` default to those of the device.
    """
    device, size = network.device, network.architecture.vision.image_size
    length, tower = processing.prompt.length, make_tower_ops(device)
    model = make_flow(network, steps, processing.summed_times, tower, quantization, keep, length)
    return FlowEngine(
        model,
        (size, size),
        length,
        checked(make_ops(device), model) if ops is None else ops,
        torch.uint8 if processing.antialias else torch.float32,
        runner,
        jacobian=jacobian,
    )


def load_network(
    checkpoint: PiCheckpoint, device: str = "cpu", dtype: str = "float32", progress: Progress = no_progress
) -> PiNetwork:
    """Load a checkpoint's parameters; arguments and errors as for :func:`load_model`."""
    architecture = checkpoint.architecture
    source = (
        f"{checkpoint.folder}: the weights are not those of {architecture.model} (LoRA adapters must be merged "
        "first; files that LeRobot wrote before October 2025 must be converted by a newer version)"
    )
    network = build_empty(architecture)
    return fill_network(network, PI_TENSORS, checkpoint.stored, source, device, dtype, progress)


def load_model(
    checkpoint: PiCheckpoint,
    device: str = "cpu",
    dtype: str = "float32",
    flow_steps: int = 0,
    tokenizer: str = "",
    progress: Progress = no_progress,
    quantization: str = "none",
    jacobian: bool = False,
) -> PiModel:
    """Load a checkpoint onto a device.

    If ``flow_steps`` is 0 or ``tokenizer`` is empty, the checkpoint's are used. ``dtype`` is the data type of the
    matrices; ``quantization`` (``none`` or ``fp8``) applies to the prefix. With ``jacobian``, chunks are guided by
    the gradient of their error.
    """
    architecture, processing = checkpoint.architecture, checkpoint.processing
    words = load_tokenizer(
        find_tokenizer(checkpoint.folder, tokenizer, checkpoint.tokenizer), architecture.vocabulary
    )
    network = load_network(checkpoint, device, dtype, progress)
    steps = flow_steps or checkpoint.flow_steps
    engine = make_engine(network, processing, steps, quantization=quantization, keep=False, jacobian=jacobian)
    return PiModel(architecture, engine, processing, words, checkpoint.trained_delay)
