"""Viewpoint adapters: a file beside a checkpoint that makes it see from where its camera was moved to.

Two kinds, both of arXiv 2512.02902, whose code is not published. ``view`` (Feature Token Modulation) has one scale
and shift for each channel of the visual tokens, behind the projector. ``view-lora`` (Feature Linear Adaptation) has
low-rank updates of the MLPs in the vision towers. Both become part of the stored weights when those are read, so
that inference costs nothing. Names of layers are the checkpoint's, without LeRobot's prefixes.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.adapters import lora_delta
from vla_ros_models.checkpoint_files import StoredTensor, list_some, read_header
from vla_ros_models.evidence import sha256
from vla_ros_models.training import Trainable
from vla_ros_models.weights import Shapes, check_weights

VIEW, VIEW_LORA = VIEWS = ("view", "view-lora")
VIEW_FILE = "view.safetensors"
FORMAT = "vla_ros.view.1"
RANK = 16
"""Rank of the low-rank updates, as published; they are not scaled."""

_LAST = re.compile(
    r"projector\.fc[23]|.*\.(multi_modal_projector\.linear|connector\.modality_projection\.proj|"
    r"visual\.merger\.linear_fc2)"
)
"""The last layers of the families' projectors; OpenVLA's is ``fc3`` if there is one."""

_MLPS = re.compile(
    r"(vision_backbone\.(fused_)?featurizer\.blocks|.*\.vision_model\.encoder\.layers|.*\.visual\.blocks)"
    r"\.\d+\.mlp\.(linear_)?fc[12]"
)


def layers_of(kind: str, names: Collection[str]) -> list[str]:
    """Return the layers that an adapter changes; ``names`` are the tensors that the network runs.

    Raises ConfigError if the network has none.
    """
    pattern = _LAST if kind == VIEW else _MLPS
    layers = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    found = sorted(layer for layer in layers if pattern.fullmatch(layer))
    if not found:
        raise ConfigError(
            f"{kind}: the network has no layer like {pattern.pattern}; this family has no such adapter"
        )
    return found[-1:] if kind == VIEW else found


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """Scale the outputs of a layer's weight [N, ...] by ``scale`` [N]."""
    return weight.float() * scale.view(-1, *[1] * (weight.dim() - 1))


def shifted(bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return the bias [N] of a layer whose outputs are scaled and shifted, [N] each."""
    return bias.float() * scale + shift


def updated(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of ``b`` [N, r] and ``a`` [r, ...] to a weight [N, ...]."""
    return weight.float() + lora_delta(a, b, 1.0).view(weight.shape)


@dataclass(frozen=True, eq=False)
class ViewAdapter:
    """The content of an adapter's file."""

    file: Path
    sha256: str  # of the file
    kind: str  # one of :data:`VIEWS`
    base: str  # :func:`base_digest` of the weights on which it was trained
    stored: Mapping[str, StoredTensor]
    tensors: Mapping[str, Tensor]  # ``LAYER.scale`` and ``.shift`` [N], or ``LAYER.a`` [r, ...] and ``.b`` [N, r]

    def merged(self, stored: Mapping[str, StoredTensor], names: Collection[str]) -> dict[str, StoredTensor]:
        """Return a checkpoint's tensors with the adapter merged into them when they are read.

        ``names`` are the tensors that the network runs. Raises CheckpointError if the adapter is another
        checkpoint's, or does not fit.
        """
        if self.base != (found := base_digest(stored)):
            files = sorted({str(one.file) for one in stored.values()})
            raise CheckpointError(
                f"{self.file}: was trained on weights with the SHA-256 {self.base}, found {found} ({files[0]} and "
                f"{len(files) - 1} more); set policy.checkpoint to that checkpoint, or train the adapter again"
            )
        layers = layers_of(self.kind, names)
        self._check({layer: stored[f"{layer}.weight"].shape for layer in layers})
        changed = dict(stored)
        for layer in layers:
            for leaf, change in self.changes(layer).items():
                name = f"{layer}.{leaf}"
                if name in stored:
                    changed[name] = stored[name].changed(change, "F32")
                elif leaf == "bias":  # SmolVLA's projector has none
                    shift = f"{layer}.shift"
                    changed[name] = StoredTensor(self.file, tuple(self.tensors[shift].shape), "F32", shift)
        return changed

    def changes(self, layer: str) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return what changes a layer's tensors."""
        names = ("a", "b") if self.kind == VIEW_LORA else ("scale", "shift")
        first, second = (self.tensors[f"{layer}.{name}"] for name in names)
        if self.kind == VIEW_LORA:
            return {"weight": partial(updated, a=first, b=second)}
        return {"weight": partial(scaled, scale=first), "bias": partial(shifted, scale=first, shift=second)}

    def _check(self, weights: Shapes) -> None:
        """Raise CheckpointError, which names all tensors that are not those of the layers' ``weights``."""
        needed: dict[str, tuple[int, ...]] = {}
        for layer, (rows, *rest) in weights.items():
            if self.kind == VIEW:
                needed |= {f"{layer}.scale": (rows,), f"{layer}.shift": (rows,)}
            else:
                rank = self.stored[f"{layer}.a"].shape[0] if f"{layer}.a" in self.stored else RANK
                needed |= {f"{layer}.a": (rank, *rest), f"{layer}.b": (rows, rank)}
        check_weights(needed, self.stored, lambda name: False, f"{self.file}: no {self.kind} of this checkpoint")
        wrong = sorted(name for name, one in self.tensors.items() if not one.isfinite().all())
        if text := list_some("tensors with NaN or Inf", wrong):
            raise CheckpointError(f"{self.file}: {text}, expected finite numbers; train it again")


def base_digest(stored: Mapping[str, StoredTensor]) -> str:
    """Return the SHA-256 of what ``sha256sum`` prints of the files of weights, sorted by their names."""
    files = sorted({one.file for one in stored.values()}, key=lambda file: file.name)
    return hashlib.sha256("".join(f"{sha256(file)}  {file.name}\n" for file in files).encode()).hexdigest()


def read_view(path: str | Path) -> ViewAdapter:
    """Read an adapter's file; raises CheckpointError if it is missing, damaged, or no adapter."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise CheckpointError(
            f"policy.view: {file} is no file; vla-ros finetune --adapter view writes OUTPUT/{VIEW_FILE}"
        )
    stored = read_header(file)
    data = file.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found = header.get("__metadata__") or {}
    try:
        about = json.loads(found.get(FORMAT, "{}"))
        kind, base = VIEWS[VIEWS.index(about["kind"])], str(about["base"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{file}: found the metadata {found}, expected {FORMAT} with kind ({' or '.join(VIEWS)}) and base; "
            "policy.view names what vla-ros finetune --adapter view wrote"
        ) from None
    return ViewAdapter(file, hashlib.sha256(data).hexdigest(), kind, base, stored, load(data))


class _Changed(nn.Module):
    """What trains of a layer's tensor; the tensor that the network runs is computed anew in each pass."""

    def __init__(self, change: Callable[..., Tensor], **parts: nn.Parameter) -> None:
        super().__init__()
        self.change, self.names = change, tuple(parts)
        for name, part in parts.items():
            self.register_parameter(name, part)

    def forward(self, stored: Tensor) -> Tensor:
        return self.change(stored, *(getattr(self, name) for name in self.names)).to(stored.dtype)


def add_view(trainable: Trainable, kind: str, rank: int = 0) -> dict[str, nn.Parameter]:
    """Add an adapter that changes nothing yet to a network; return what trains, by its name in the file.

    The network runs the merged weights, so that what is written is what was trained, in the type of the weights.
    Raises ConfigError if the family has no such adapter.
    """
    prepare: Callable[[], Mapping[str, str]] = getattr(trainable.trainee, "open_vision", dict)
    names = {**trainable.names, **prepare()}
    stems = {stored.rpartition(".")[0]: name.rpartition(".")[0] for name, stored in names.items()}
    found: dict[str, nn.Parameter] = {}
    for layer in layers_of(kind, list(names.values())):
        module: Any = trainable.trainee.get_submodule(stems[layer])
        weight: Tensor = module.weight
        rows = weight.shape[0]
        zeros = partial(torch.zeros, dtype=torch.float32, device=weight.device)
        if kind == VIEW:
            scale, shift = nn.Parameter(zeros(rows) + 1), nn.Parameter(zeros(rows))
            if getattr(module, "bias", None) is None:
                module.bias = nn.Parameter(weight.new_zeros(rows), requires_grad=False)
            bias = _Changed(shifted, scale=scale, shift=shift)
            parametrize.register_parametrization(module, "bias", bias)
            changed, parts = _Changed(scaled, scale=scale), {"scale": scale, "shift": shift}
        else:
            a, b = nn.Parameter(zeros(rank or RANK, *weight.shape[1:])), nn.Parameter(zeros(rows, rank or RANK))
            nn.init.kaiming_uniform_(a, a=5**0.5)
            changed, parts = _Changed(updated, a=a, b=b), {"a": a, "b": b}
        parametrize.register_parametrization(module, "weight", changed)
        found |= {f"{layer}.{name}": part for name, part in parts.items()}
    return found


def write_view(file: Path, kind: str, base: str, parts: Mapping[str, Tensor]) -> None:
    """Write an adapter; ``base`` is the :func:`base_digest` of the weights on which it was trained."""
    tensors = {name: part.detach().float().cpu().contiguous() for name, part in parts.items()}
    partial_file = file.with_suffix(".part")
    # One entry: safetensors writes several in any order, and equal adapters must have equal hashes.
    save_file(tensors, partial_file, metadata={FORMAT: json.dumps({"kind": kind, "base": base})})
    partial_file.chmod(0o644)  # safetensors makes it readable only by its owner
    partial_file.rename(file)
