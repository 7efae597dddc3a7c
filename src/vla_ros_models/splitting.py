"""Splits a Llama and its vision towers over several GPUs: what each of them holds.

Every rank has some attention heads, MLP features and rows of the head, as in Megatron-LM: the outputs of queries,
keys, values, gate and up are split, and the inputs of the two products that are added to the residual stream. The
embedding, norms and what is outside of the decoder are on every rank, and a vision tower is on one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vla_ros.errors import ConfigError
from vla_ros_models.checkpoint_files import Cut, StoredTensor
from vla_ros_models.engine.lowbit import FRAGMENT_N, GROUP
from vla_ros_models.engine.shapes import MOST_GPUS, DecoderShape

_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Shard:
    """The part of a model on one of ``count`` GPUs."""

    rank: int = 0
    count: int = 1

    def shape(self, shape: DecoderShape) -> DecoderShape:
        """Return the sizes of a decoder's shard; its embedding has the whole vocabulary."""
        return replace(
            shape,
            heads=shape.heads // self.count,
            kv_heads=shape.kv_heads // self.count,
            intermediate_size=shape.intermediate_size // self.count,
        )

    def has_tower(self, index: int) -> bool:
        return self.owner(index) == self.rank

    def owner(self, index: int) -> int:
        """Return the rank that runs a vision tower."""
        return index % self.count

    def cut(self, manifest: Mapping[str, StoredTensor], decoder: str) -> Cut:
        """Return which part of each stored tensor to load; the decoder's names begin with ``decoder``."""

        def part(name: str) -> tuple[slice, ...] | None:
            layer = name.removesuffix(".weight").rpartition(".")[2]
            axis = 0 if layer in _OUTPUTS else 1 if layer in _INPUTS else None
            if self.count == 1 or axis is None or not name.startswith(decoder):
                return None
            size = manifest[name].shape[axis] // self.count
            return (slice(None),) * axis + (slice(self.rank * size, (self.rank + 1) * size),)

        return part


def check_split(shape: DecoderShape, count: int, quantization: str) -> None:
    """Raise ConfigError if a decoder or its quantised weights cannot be split over ``count`` GPUs."""
    fitting = [one for one in range(1, MOST_GPUS + 1) if not _obstacle(shape, one, quantization)]
    if found := _obstacle(shape, count, quantization):
        others = " or ".join(str(one) for one in fitting if one > 1)
        raise ConfigError(
            f"policy.gpus: {count} GPUs do not fit this checkpoint with policy.quantization {quantization}: {found}"
            + "; "
            + (f"set policy.gpus to {others}, or to 1" if others else "set policy.gpus to 1")
        )


def _obstacle(shape: DecoderShape, count: int, quantization: str) -> str:
    """Say why a decoder cannot be split; "" if it can be."""
    if count == 1:
        return ""
    least = 1 if quantization == "none" else 2 * FRAGMENT_N  # outputs of one matrix instruction
    sizes = {
        "attention heads": (shape.heads, 1),
        "heads of keys and values": (shape.kv_heads, 1),
        "MLP features": (shape.intermediate_size, least),
        "tokens of the vocabulary": (shape.vocab_size, 1),
    }
    for what, (size, multiple) in sizes.items():
        if size % (count * multiple):
            return f"{size} {what} are no multiple of {count * multiple}"
    inputs = {"attention": shape.heads * shape.head_dim, "MLP": shape.intermediate_size}
    for what, size in inputs.items():
        if quantization == "int4" and size % (count * GROUP):
            return f"{size} inputs after the {what} are no multiple of {count} groups of {GROUP} 4-bit weights"
    return ""
