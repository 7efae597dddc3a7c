"""SmolVLA as a :class:`~vla_ros.policies.base.Policy`."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import IntArray
from vla_ros_models.engine.device_ops import make_ops, make_tower_ops
from vla_ros_models.engine.flow_engine import FlowEngine
from vla_ros_models.engine.kernel_check import checked
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.runner import Runner
from vla_ros_models.flow_policy import FlowPolicy, LoadedFlow
from vla_ros_models.network_policy import Placement
from vla_ros_models.normalization import Array
from vla_ros_models.smolvla import SmolVlaOptions
from vla_ros_models.smolvla.loading import SmolVlaCheckpoint, load_network, read_checkpoint, read_words
from vla_ros_models.smolvla.network import SmolVlaNetwork, build_flow
from vla_ros_models.training import Trainable


@dataclass(frozen=True, eq=False)
class SmolVlaModel(LoadedFlow):
    """A loaded model, which keeps no state between calls."""

    cameras: int = 0  # as for :class:`~vla_ros_models.smolvla.loading.SmolVlaCheckpoint`
    empty: int = 0
    around: tuple[int, ...] = ()  # rows of the embedding with the control tokens around an image

    def _tokens(self, instruction: str, state: Array, images: int) -> IntArray:
        """Return the prompt's tokens and the state's.

        Tokens of missing images are masked, those around them are not.
        """
        missing = min(self.cameras - images, self.empty)
        return np.array([*self.around * missing, *super()._tokens(instruction, state, images), 0], np.int64)


def make_engine(
    network: SmolVlaNetwork,
    steps: int,
    prompt_tokens: int,
    image_ids: tuple[int, ...] = (),
    runner: Runner | None = None,
    ops: Ops | None = None,
    jacobian: bool = False,
    **options: Any,
) -> FlowEngine:
    """Return an engine that runs a loaded ``network``; ``options`` are those of ``build_flow``."""
    device, side = network.device, network.architecture.vision.image_size
    model = build_flow(network, steps, make_tower_ops(device), prompt_tokens, image_ids, **options)
    chosen = checked(make_ops(device), model) if ops is None else ops
    return FlowEngine(model, (side, side), prompt_tokens, chosen, torch.float32, runner, jacobian)


def load_model(
    checkpoint: SmolVlaCheckpoint,
    device: str = "cpu",
    dtype: str = "float32",
    flow_steps: int = 0,
    jacobian: bool = False,
    progress: Progress = no_progress,
) -> SmolVlaModel:
    """Load a checkpoint onto a device; ``flow_steps`` 0 takes the checkpoint's."""
    sizes = checkpoint.architecture
    words = read_words(checkpoint.words, sizes.vocabulary)
    processing = replace(checkpoint.processing, control=words.tokenizer.control, truncate_left=words.truncate_left)
    ids = words.image_ids if sizes.special_tokens else ()
    longest = processing.prompt.length + 1 + len(ids) * checkpoint.empty
    network = load_network(checkpoint, device, dtype, progress)
    engine = make_engine(network, flow_steps or checkpoint.flow_steps, longest, ids, jacobian=jacobian)
    around = tuple(range(sizes.vocabulary, sizes.vocabulary + len(ids)))
    side, cameras, empty = sizes.vision.image_size, checkpoint.cameras, checkpoint.empty
    return SmolVlaModel(engine, processing, words.tokenizer, side, longest, 0, cameras, empty, around)


class SmolVlaPolicy(FlowPolicy[SmolVlaCheckpoint]):
    """Runs SmolVLA; images and state have the names in ``config.json`` without ``observation.`` and ``images.``."""

    Options = SmolVlaOptions
    title = "smolvla"
    _options: SmolVlaOptions

    def _read(self) -> SmolVlaCheckpoint:
        return read_checkpoint(self.folder, self._options)

    def _load(self, checkpoint: SmolVlaCheckpoint, where: Placement, progress: Progress) -> SmolVlaModel:
        options = self._options
        jacobian = options.rtc == "jacobian"
        return load_model(checkpoint, str(where.device), where.dtype, options.flow_steps, jacobian, progress)

    def trainable(self, where: Placement, recompute_layers: bool = True, **options: Any) -> Trainable:
        from vla_ros_models.smolvla.training import make_trainable

        found = self._read()
        self._require_teacher(found.distilled)
        return make_trainable(found, str(where.device), where.dtype, recompute_layers, **options)
