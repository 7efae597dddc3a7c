"""Shared parts of the policies with OpenVLA's network: placement, loading, and the gripper convention."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch

from vla_ros.config import Config
from vla_ros.contract.parts import Part, parse_parts
from vla_ros.contract.spec import PolicySpec
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Policy, Progress
from vla_ros.policies.checkpoint_files import checkpoint_folder
from vla_ros.policies.devices import choose_device, explain_out_of_memory
from vla_ros.policies.openvla import memory
from vla_ros.policies.openvla.actions import QUANTILES, ActionBins, ActionStatistics, read_statistics
from vla_ros.policies.openvla.build_engine import fill_quantized
from vla_ros.policies.openvla.choices import check_attention, choose_dtype, choose_engine
from vla_ros.policies.openvla.loading import Produce, fill
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.options import CheckpointOptions
from vla_ros.policies.openvla.prompt import PromptEncoder
from vla_ros.types import FloatArray

logger = logging.getLogger(__name__)

SELF_TEST_INSTRUCTION = "pick up the red cube"
LONG_PROMPT = 80
"""Tokens of a long prompt. Its graph is captured at the start: it answers while a better one is captured."""

NATIVE_GRIPPER = "0..1"
"""The gripper convention of Open X-Embodiment and LIBERO: 0 closed, 1 open."""


@dataclass(frozen=True)
class LoadedNetwork:
    """A loaded checkpoint."""

    model: OpenVLAModel  # the network
    prompt: PromptEncoder  # encodes instructions as tokens
    bins: ActionBins  # converts tokens to normalised actions
    statistics: ActionStatistics  # un-normalise actions
    advice: partial[str]  # returns the options to choose when memory runs out

    def close(self) -> None:
        """Free everything except the model."""


L = TypeVar("L", bound=LoadedNetwork)


@dataclass(frozen=True)
class Placement:
    """Device, data type and engine of a network."""

    device: torch.device  # of the weights
    dtype: str  # name of the type of activations and unquantised weights
    fast: bool  # True for the engine, False for the reference path

    @classmethod
    def choose(cls, options: CheckpointOptions) -> Placement:
        """Resolve the options for this machine, or raise ConfigError; set torch's threads."""
        if options.threads:
            torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        dtype = choose_dtype(options, device)
        check_attention(options.attention, device, dtype)
        return cls(device, dtype, choose_engine(options, device) == "graph")

    def __str__(self) -> str:
        return f"{self.device} in {self.dtype}"


class NetworkPolicy(Policy, Generic[L]):
    """A policy over OpenVLA's network.

    Attributes:
        title: The policy's name in messages.
    """

    title: ClassVar[str] = "OpenVLA"

    def __init__(self, config: Config, options: CheckpointOptions) -> None:
        self._checkpoint, self._placed_by = options.checkpoint, options
        self._declared = config.features.action
        self._loaded: L | None = None

    @property
    def loaded(self) -> L:
        """The network with its preprocessing and postprocessing, once :meth:`load` has been called."""
        if self._loaded is None:
            raise VlaRosError(f"{self.title}: not loaded; call load() first")
        return self._loaded

    def other_statistics(self, normalized: FloatArray) -> dict[str, FloatArray]:
        """See :class:`~vla_ros.policies.base.Policy`."""
        own = self.loaded.statistics
        return {
            key: statistics.unnormalize(normalized)
            for key, statistics in self._statistics(checkpoint_folder(self._checkpoint)).items()
            if key != own.key and statistics.dimension == own.dimension
        }

    def close(self) -> None:
        """Free the weights."""
        if self._loaded is None:
            return
        cuda = self._loaded.model.device.type == "cuda"
        self._loaded.close()
        self._loaded = None
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()

    def _statistics(self, folder: Path, group: str = "action") -> Mapping[str, ActionStatistics]:
        return read_statistics(folder, group, QUANTILES)

    @contextmanager
    def _filled(
        self, model: OpenVLAModel, produce: Produce, folder: Path, where: Placement, progress: Progress
    ) -> Iterator[tuple[DecoderWeights | None, partial[str]]]:
        """Check the memory and load the weights into ``model``; explain out-of-memory errors here and in the block.

        Yields:
            The decoder's quantised weights, or None where the model has them, and ``LoadedNetwork.advice``.
        """
        kind, device = self._placed_by.quantization, str(where.device)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        need = memory.check_memory(shapes, model.architecture, where.dtype, kind, device)
        logger.info("%s %s: %s", self.title, folder.name, need)
        progress(0.0, need)
        advice = partial(memory.advise, shapes, model.architecture, device)

        def partly(share: float, what: str) -> None:
            progress(0.95 * share, what)

        with explain_out_of_memory(device, advice):
            weights, dtype = None, getattr(torch, where.dtype)
            if where.fast and kind != "none":  # the engine quantises by itself, from the weights as they are stored
                weights = fill_quantized(model, produce, where.device, dtype, kind, partly)
            else:
                fill(model, produce, where.device, dtype, partly)
            progress(0.95, "self-test" if self._placed_by.self_test else "warm-up")
            yield weights, advice

    def _action(self, dimension: int, undeclared: str) -> tuple[Part, ...]:
        """Return the parts of the action: delta and gripper for a single arm, otherwise ``features.action``.

        The gripper has the range declared by ``features.action``, or the form ``undeclared``.
        """
        if dimension != PolicySpec.dimension:
            return ()
        declared = parse_parts(" + ".join(self._declared), action=True) if self._declared else ()
        ranges = [part.form for part in declared if part.quantity == "gripper" and part.range is not None]
        return Part("arm", "tip_delta"), Part("arm", "gripper", ranges[0] if len(ranges) == 1 else undeclared)

    def _with_declared_gripper(self, actions: FloatArray) -> FloatArray:
        """Convert the gripper of actions [K, D] from 0 closed, 1 open to the range in :attr:`spec`."""
        column = self.spec.gripper
        if column is None or (ends := self.spec.action[-1].range) is None:
            return actions
        actions = actions.copy()
        actions[:, column] = ends[0] + actions[:, column] * (ends[1] - ends[0])
        return actions
