"""Base class for OpenVLA's network: statistics, gripper convention, engine, fallback."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import torch

from vla_ros.config import Config
from vla_ros.contract.components import Component, parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.engine.device_ops import make_ops
from vla_ros.engine.kernel_check import checked
from vla_ros.engine.ops import Ops
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import ConfigError, DeviceLostError
from vla_ros.policies.base import Progress, Session
from vla_ros.policies.checkpoint_files import Produce, checkpoint_folder
from vla_ros.policies.memory import MemoryCheck
from vla_ros.policies.network_policy import Asked, Closes, NetworkPolicy, Placement
from vla_ros.policies.openvla.actions import (
    QUANTILES,
    ActionBins,
    ActionStatistics,
    choose,
    read_dataset_statistics,
)
from vla_ros.policies.openvla.build_engine import fill_quantized
from vla_ros.policies.openvla.loading import OPENVLA_CHOICES, plan_memory
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.options import CheckpointOptions
from vla_ros.policies.openvla.prompt import PromptEncoder
from vla_ros.policies.openvla.vision_encoder import VisionEncoder, checked_encoder
from vla_ros.policies.weights import fill, parameter_shapes
from vla_ros.types import ActionChunk, FloatArray, IntArray, UInt8Array


def choose_engine(options: CheckpointOptions, device: torch.device) -> str:
    """Resolve ``policy.engine``; ``auto`` means ``graph`` if its kernels run, else ``reference``.

    nf4 runs on the reference path only, so it selects that path.
    """
    asked, weights = options.engine, options.quantization
    missing = _why_no_engine(device) if asked == "auto" else ""
    engine = asked if asked != "auto" else "reference" if missing or weights == "nf4" else "graph"
    if engine == "graph" and weights == "nf4":
        raise ConfigError(
            "policy.quantization: nf4 is bitsandbytes' format, which only the reference path runs, and "
            "policy.engine is graph; choose int4, the engine's 4-bit format, or policy.engine:=reference"
        )
    if engine == "reference" and weights in ("int4", "fp8"):
        instead = {"int4": "nf4, bitsandbytes' 4-bit format", "fp8": "int8, or none"}[weights]
        raise ConfigError(
            f"policy.quantization: {weights} is the engine's format, and "
            f"{missing or 'policy.engine is reference'}; choose {instead}"
        )
    return engine


def _why_no_engine(device: torch.device) -> str:
    """Return why the engine's kernels cannot run, or an empty string.

    They need Triton and bfloat16 tensor cores (Ampere).
    """
    if device.type != "cuda":
        return f"the engine needs an NVIDIA GPU, policy.device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "the engine needs Triton, which is not installed"
    found = torch.cuda.get_device_capability(device)
    return "" if found >= (8, 0) else f"the engine needs compute capability 8.0, {device} has {found[0]}.{found[1]}"


logger = logging.getLogger(__name__)

LONG_PROMPT = 80
"""Tokens in a long prompt. Its graph is captured at load, and runs other prompts until theirs are captured."""

NATIVE_GRIPPER = "0..1"
"""The gripper convention of Open X-Embodiment and LIBERO: 0 closed, 1 open."""

E = TypeVar("E", bound=Closes)


@dataclass(frozen=True)
class LoadedNetwork:
    """A loaded checkpoint with OpenVLA's network."""

    model: OpenVLAModel  # the reference network
    prompt: PromptEncoder  # encodes instructions as tokens
    bins: ActionBins  # converts tokens to normalised actions
    statistics: ActionStatistics  # bounds that un-normalise actions

    def close(self) -> None:
        """Free everything except the model."""


@dataclass
class PromptSession(Session):
    """One robot's encoded instruction."""

    instruction: str = ""
    tokens: IntArray | None = field(default=None)  # the prompt's tokens, int64 [L], on the host

    def encode(self, encoder: PromptEncoder, instruction: str) -> IntArray:
        """Return the prompt's tokens; only a new instruction is encoded."""
        if self.tokens is None or self.instruction != instruction:
            self.tokens, self.instruction = encoder.encode(instruction), instruction
        return self.tokens


class PromptRequest(Protocol):
    """A request with a prompt."""

    @property
    def prompt(self) -> IntArray:
        """The prompt's tokens, int64 [L]."""


L = TypeVar("L", bound=LoadedNetwork)
R = TypeVar("R", bound=PromptRequest)
S = TypeVar("S", bound=PromptSession)


class OpenVLANetworkPolicy(NetworkPolicy[L, S, R]):
    """A policy that runs OpenVLA's network."""

    title: ClassVar[str] = "OpenVLA"

    def __init__(self, config: Config, options: CheckpointOptions) -> None:
        super().__init__(options)
        self._network_options = options
        self._declared = config.features.action

    def other_statistics(self, normalized: FloatArray) -> dict[str, FloatArray]:
        own = self.loaded.statistics
        return {
            key: statistics.unnormalize(normalized)
            for key, statistics in self._statistics(self.folder).items()
            if key != own.key and statistics.dimension == own.dimension
        }

    @property
    def _base(self) -> Path:
        """Folder of the network's weights: ``policy.base`` if set, else the checkpoint's."""
        return checkpoint_folder(self._network_options.base) if self._network_options.base else self.folder

    def _chosen(self, key: str, group: str = "action") -> ActionStatistics:
        """Return a dataset's statistics from the checkpoint, else from ``policy.base``."""
        own = self.folder if (self.folder / "dataset_statistics.json").exists() else self._base
        return choose(self._statistics(own, group), key)

    def _details(self) -> str:
        return f", un-normalised by '{self.loaded.statistics.key}'"

    def _statistics(self, folder: Path, group: str = "action") -> Mapping[str, ActionStatistics]:
        return read_dataset_statistics(folder, group, QUANTILES)

    def _runs_engine(self, where: Placement) -> bool:
        """Return True for the engine, False for the reference path.

        Raises ConfigError if an option does not fit the others or the machine.
        """
        return choose_engine(self._network_options, where.device) == "graph"

    def _set_memory(self, model: OpenVLAModel, device: torch.device) -> None:
        plan = partial(plan_memory, parameter_shapes(model), model.architecture)
        self._memory = MemoryCheck(plan, OPENVLA_CHOICES, str(device))

    def _fill(
        self, model: OpenVLAModel, produce: Produce, where: Placement, progress: Progress
    ) -> DecoderWeights | None:
        kind, dtype = self._network_options.quantization, getattr(torch, where.dtype)
        if self._runs_engine(where) and kind != "none":
            return fill_quantized(model, produce, where.device, dtype, kind, progress)
        fill(model, produce, where.device, dtype, progress)
        return None

    def _kernels(
        self, model: OpenVLAModel, decoder: DecoderWeights | None, images: Sequence[UInt8Array], film: bool = False
    ) -> tuple[Ops | None, VisionEncoder | None]:
        """Return checked operations and a checked vision encoder; None stands for the default.

        Operations are checked only with a quantised ``decoder``, because its answers cannot be compared with the
        reference path's.
        """
        if not self._network_options.self_test:
            return None, None
        strict = self._network_options.engine != "auto"
        encode = None if film else checked_encoder(model, images, strict=strict)
        return None if decoder is None else checked(make_ops(decoder.device), decoder, strict=strict), encode

    def _engine(self, make: Callable[[], E], check: Callable[[E], None], has_fallback: bool) -> E | None:
        """Make and check an engine; return None if that fails and ``policy.engine`` is ``auto``."""
        engine = None
        try:
            engine = make()
            check(engine)
        except Exception as error:
            if engine is not None:
                engine.close()
            if self._network_options.engine != "auto" or not has_fallback or isinstance(error, DeviceLostError):
                raise
            logger.warning(
                "policy.engine: the engine failed, using the reference path, which is several times slower: %s. "
                "Set policy.engine:=reference to silence this warning",
                error,
            )
            return None
        return engine

    def _action(self, dimension: int, undeclared: str) -> tuple[Component, ...]:
        """Return the parts of an action: delta and gripper if it has seven numbers, else none.

        The gripper has the range that ``features.action`` declares, or the form ``undeclared``. Without parts,
        ``features.action`` must name them.
        """
        if dimension != PolicySpec.dimension:
            return ()
        declared = parse_components(" + ".join(self._declared), action=True) if self._declared else ()
        ranges = [part.form for part in declared if part.quantity == "gripper" and part.range is not None]
        return Component("arm", "tip_delta"), Component(
            "arm", "gripper", ranges[0] if len(ranges) == 1 else undeclared
        )

    def _chunk(
        self,
        asked: Asked[S, R],
        normalized: FloatArray,
        tokens: IntArray | None,
        margins: FloatArray,
        stages: Mapping[str, float],
        **info: object,
    ) -> ActionChunk:
        """Un-normalise a chunk [K, D]; ``tokens`` is None if actions are not tokens."""
        started, loaded = time.perf_counter(), self.loaded
        if tokens is not None:
            info |= {"logit_margins": tuple(map(float, margins)), "outside_bins": loaded.bins.outside(tokens)}
        actions = self._with_declared_gripper(loaded.statistics.unnormalize(normalized))
        return ActionChunk(
            actions=actions,
            stamp=asked.observation.stamp,
            normalized=normalized,
            tokens=tokens,
            stages_ms={**stages, "post": (time.perf_counter() - started) * 1e3},
            info={"prompt_tokens": len(asked.request.prompt), **info},
        )

    def _with_declared_gripper(self, actions: FloatArray) -> FloatArray:
        """Scale the gripper of actions [K, D], 0 closed to 1 open, to the range in :attr:`spec`."""
        column = self.spec.gripper
        if column is None or (ends := self.spec.action[-1].range) is None:
            return actions
        actions = actions.copy()
        actions[:, column] = ends[0] + actions[:, column] * (ends[1] - ends[0])
        return actions
