"""Loads a model and makes its engine."""

import torch

from vla_ros.policies.base import Progress, no_progress
from vla_ros_models.engine.device_ops import make_ops, make_tower_ops
from vla_ros_models.engine.flow_engine import FlowEngine
from vla_ros_models.engine.kernel_check import checked
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.runner import Runner
from vla_ros_models.flow_policy import LoadedFlow
from vla_ros_models.pi.checkpoint import PiCheckpoint
from vla_ros_models.pi.loading import PI_TENSORS, fill_network
from vla_ros_models.pi.network import PiNetwork, build_empty, make_flow
from vla_ros_models.pi.processing import Processing, find_tokenizer, load_tokenizer


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
) -> LoadedFlow:
    """Load a checkpoint onto a device.

    If ``flow_steps`` is 0 or ``tokenizer`` is empty, the checkpoint's are used. ``dtype`` is the data type of the
    matrices; ``quantization`` (``none`` or ``fp8``) applies to the prefix. With ``jacobian``, chunks are guided by
    the gradient of their error.
    """
    architecture, processing = checkpoint.architecture, checkpoint.processing
    words = load_tokenizer(
        find_tokenizer(checkpoint.folder, tokenizer, checkpoint.tokenizer, checkpoint.base), architecture.vocabulary
    )
    network = load_network(checkpoint, device, dtype, progress)
    steps, side = flow_steps or checkpoint.flow_steps, architecture.vision.image_size
    engine = make_engine(network, processing, steps, quantization=quantization, keep=False, jacobian=jacobian)
    return LoadedFlow(engine, processing, words, side, processing.prompt.length, checkpoint.trained_delay)
