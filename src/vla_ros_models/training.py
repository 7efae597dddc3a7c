"""What the training of every family shares: a network with its checkpoint's parameters, and parts of losses."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vla_ros.contract.spec import PolicySpec
from vla_ros.types import FloatArray, Observation, UInt8Array
from vla_ros_models.checkpoint_files import Produce, StoredTensor
from vla_ros_models.engine.shapes import DecoderShape, TowerShape
from vla_ros_models.engine.training import Call
from vla_ros_models.vision_tower import Block
from vla_ros_models.weights import Joined

if TYPE_CHECKING:
    from typing import Self

ADAPTER = "default"
"""Name of the adapter that trains, as peft calls it."""

Activation = Callable[[Tensor], Tensor]


class StoredPart(Protocol):
    """A stored tensor of which a parameter consists."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def separate(network: nn.Module, parts: Mapping[str, Sequence[StoredPart]]) -> dict[str, str]:
    """Split fused layers into those that the checkpoint stores; return the stored name of every parameter.

    ``parts`` lists the stored tensors of each parameter, stack_arrays along its first axis.
    """
    names: dict[str, str] = {}
    for name, stored in parts.items():
        if len(stored) == 1:
            names[name] = stored[0].name
            continue
        owner, _, leaf = name.rpartition(".")
        for part in stored:
            names[f"{owner}.{part.name.split('.')[-2]}.{leaf}"] = part.name
        if leaf == "weight":
            _replace(network, owner, _separated(network.get_submodule(owner), stored))
    return names


def _separated(layer: Any, stored: Sequence[StoredPart]) -> Joined:
    parts: dict[str, nn.Module] = {}
    rows = [part.shape[0] for part in stored]
    biases = [None] * len(rows) if layer.bias is None else layer.bias.data.split(rows)
    for part, weight, bias in zip(stored, layer.weight.data.split(rows), biases, strict=True):
        with torch.device("meta"):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
        parts[part.name.split(".")[-2]] = linear
    return Joined(parts)


def _replace(network: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(owner), leaf, module)


def run_block(block: Block, tokens: Tensor, activate: Activation, film: Tensor | None = None) -> Tensor:
    """Call one block of a vision tower on tokens [N, P, width]; ``film`` [2, N or 1, 1, width] modulates it."""
    attention, mlp = block.scales
    branch = block.attn(block.norm1(tokens))
    tokens = tokens + (branch if attention is None else branch * attention)
    if film is not None:
        tokens = tokens * film[0] + film[1]
    branch = block.mlp.fc2(activate(block.mlp.fc1(block.norm2(tokens))))
    total: Tensor = tokens + (branch if mlp is None else branch * mlp)
    return total


def run_blocks(
    blocks: Sequence[Any], tokens: Tensor, activate: Activation, run: Call, film: Sequence[Tensor | None] = ()
) -> Tensor:
    """Call the blocks of a vision tower; ``run`` calls each, ``film`` has what modulates each, or is empty."""
    for block, pair in zip(blocks, film or [None] * len(blocks), strict=True):
        tokens = run(run_block, block, tokens, activate, pair)
    return tokens


def masked_mean(error: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of ``error`` where ``counts``, of the same shape or one that expands to it, is True."""
    counts = counts.expand_as(error)
    return (error * counts).sum() / counts.sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors of a batch, the base of each family's; the first axis of each tensor is the sample."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "Self":
        """Return the batch with every tensor changed."""

        def changed(one: Any) -> Any:
            if isinstance(one, Batch):
                return one.each(change)
            if isinstance(one, tuple):
                return tuple(map(changed, one))
            return change(one) if isinstance(one, Tensor) else one

        return replace(self, **{one.name: changed(getattr(self, one.name)) for one in fields(self)})

    def after(self, count: int) -> "Self":
        """Return the batch without its first ``count`` samples."""
        return self.each(lambda one: one[count:])

    def to(self, device: torch.device) -> "Self":
        return self.each(lambda one: one.to(device, non_blocking=True))

    def pin_memory(self) -> "Self":
        """Return the batch in memory that a GPU copies from; called by torch's loader."""
        return self.each(Tensor.pin_memory)


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch."""

    total: Tensor  # scalar, float32
    element: Tensor  # float32, before masks and reduction


Prepared = Mapping[str, NDArray[Any]]
"""A sample's arrays, one for each tensor of a batch."""

Augment = Callable[[str, UInt8Array, np.random.Generator], NDArray[Any]]
"""Takes an image's key and the image as the network gets it, uint8 [H, W, 3] or float32 in [0, 1]; returns one."""


def as_it_is(key: str, image: UInt8Array, random: np.random.Generator) -> NDArray[Any]:
    """Return the image as it is."""
    return image


class SampleInputs(Protocol):
    """Prepares what a network is trained on, as inference prepares what it sees. Picklable."""

    def prepare(
        self,
        observation: Observation,
        actions: FloatArray,
        is_pad: NDArray[np.bool_],
        random: np.random.Generator,
        augment: Augment = as_it_is,
    ) -> Prepared:
        """Return a sample's arrays; the other arguments are as in the laboratory's ``Sample``.

        ``random`` draws noise, times and what augments images.
        """

    def collate(self, samples: Sequence[Prepared]) -> Any:
        """Return the batch that the trainee takes."""


@dataclass(frozen=True, eq=False)
class Trainable:
    """A checkpoint as the trainer takes it."""

    trainee: nn.Module  # maps a batch to its :class:`BatchLoss`; no parameter requires a gradient
    names: Mapping[str, str]  # each parameter of the trainee to its name in ``stored``
    stored: Mapping[str, StoredTensor]  # the checkpoint's tensors
    inputs: SampleInputs
    spec: PolicySpec
    decoder: DecoderShape  # the widest one
    family: str  # ``pi0``, ``pi05``, ``smolvla``, ``groot``, ``openvla`` or ``oft``
    layout: str = ""  # where published recipes of one family differ: ``openpi`` or ``lerobot``; ``l1`` or ``none``
    produce: Produce | None = None  # reads tensors that are not in safetensors files; None: all are
    tied: tuple[str, ...] = ()  # names of one tensor
    tower: TowerShape | None = None  # the widest vision tower; None if its share is small
    initialize: Callable[[int], object] | None = (
        None  # draws new weights from a seed; None: not known for this family
    )
    row: int | None = None  # entry of a tensor with one for each embodiment; None if there are none
    delay: int = 0  # longest delay of the checkpoint's trained real-time chunking; 0 without such training


def sincos_positions(patches: int, width: int, slowest: float = 100.0) -> Tensor:
    """Return the sine-cosine embedding of rows and columns (Beyer et al., 2022), float32 [patches, width]."""
    side, quarter = math.isqrt(patches), width // 4
    rates = slowest ** -(torch.arange(quarter) / quarter)
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [axis.reshape(-1, 1) * rates for axis in (row, column)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)


@torch.no_grad()
def draw_weights(network: nn.Module, deviations: Callable[[str, Tensor], float | Tensor], seed: int) -> None:
    """Draw a network's parameters; ``deviations`` returns a deviation, or the value itself as a tensor."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        found = deviations(name, parameter)
        if not isinstance(found, Tensor):
            found = torch.randn(parameter.shape, generator=generator) * found
        parameter.copy_(found.expand(parameter.shape) if found.ndim == 0 else found.view_as(parameter))


def stack_arrays(samples: Sequence[Prepared], key: str, pad: float = 0) -> Tensor:
    """Stack an array of all samples; arrays that are shorter along their last axis are pad_numbers at its end."""
    arrays = [sample[key] for sample in samples]
    length = max(array.shape[-1] for array in arrays) if arrays[0].ndim else 0
    if any(array.ndim and array.shape[-1] != length for array in arrays):
        arrays = [
            np.pad(one, [(0, 0)] * (one.ndim - 1) + [(0, length - one.shape[-1])], constant_values=pad)
            for one in arrays
        ]
    return torch.from_numpy(np.stack(arrays))


def flow_time(random: np.random.Generator) -> np.float32:
    """Draw a flow time, ``0.999 * Beta(1.5, 1) + 0.001``, 1 for noise, as openpi and LeRobot do."""
    return np.float32(0.999 * random.random() ** (1 / 1.5) + 0.001)


def pad_numbers(values: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Pad [..., N] with zeros to float32 [..., size]."""
    width = [(0, 0)] * (values.ndim - 1) + [(0, size - values.shape[-1])]
    return np.pad(np.asarray(values, np.float32), width)
