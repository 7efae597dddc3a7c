"""Dequantises weights that bitsandbytes stored: NF4 and FP4, with and without double quantisation, and LLM.int8().

The numbers are those of bitsandbytes 0.50.2 to the bit (``functional.dequantize_4bit``,
``int8_vectorwise_dequant``), which is not needed. A 4-bit weight has two numbers a byte, the first in the high
half, and one scale per block in the order of storage; the table of the 16 values is in the file. An int8 weight has
one scale per output, ``SCB``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import Fields, StoredTensor, from_files, list_some, read_json, read_manifest

_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(?:nf4|fp4)")
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_INT8_STEP = 7.874015718698502e-3  # 1 / 127 as bitsandbytes rounds it
_HARMLESS = {
    "stated by the tensors": "load_in_* _load_in_* bnb_4bit_quant_type bnb_4bit_use_double_quant "
    "bnb_4bit_quant_storage",
    "how bitsandbytes multiplies": "bnb_4bit_compute_dtype llm_int8_threshold llm_int8_enable_fp32_cpu_offload "
    "llm_int8_has_fp16_weight bnb_4bit_modules_to_not_convert",
}


@dataclass(frozen=True)
class Packing:
    """How a 4-bit weight is packed, as its ``quant_state`` says."""

    shape: tuple[int, ...]
    dtype: str  # of the dequantised weight, such as ``bfloat16``
    block: int  # numbers with one scale
    nested_block: int = 0  # scales with one scale of their own; 0 if scales are not quantised
    offset: float = 0.0  # added to quantised scales

    def unpack(self, packed: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight; ``parts`` are ``quant_map`` [16], ``absmax`` and, for quantised scales, the nested."""
        scales = parts["absmax"]
        if self.nested_block:
            values = parts["nested_quant_map"][scales.int()]
            scales = _scaled(values, parts["nested_absmax"], self.nested_block) + self.offset
        table = parts["quant_map"]
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)  # [256, 2] numbers of a byte
        numbers = pairs[packed.flatten().view(torch.uint8).int()].flatten()[: prod(self.shape)]
        dtype: torch.dtype = getattr(torch, self.dtype)
        return _scaled(numbers, scales, self.block).to(dtype).view(self.shape)


def _scaled(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of ``values`` [N] by its scale, in place."""
    whole = len(values) // block
    values[: whole * block].view(whole, block).mul_(scales[:whole, None])
    if whole * block < len(values):
        values[whole * block :].mul_(scales[whole])
    return values


def read_dequantized(folder: Path) -> dict[str, StoredTensor]:
    """List every tensor of a checkpoint as it is after dequantising, which is done when it is read.

    Raises CheckpointError if ``quantization_config`` names another method or contradicts the tensors, and the
    errors of :func:`~vla_ros_models.checkpoint_files.read_manifest`.
    """
    stored = read_manifest(folder)
    states = [name for name in stored if _STATE.fullmatch(name)]
    found = {name.removesuffix("SCB") + "weight": _int8(name, stored) for name in stored if name.endswith(".SCB")}
    for name, state in from_files(stored)(states):
        weight = _STATE.sub(r"\1", name)
        found[weight] = _four_bit(weight, bytes(state.tolist()), stored)
    _check(folder, list(found))
    return {name: one for name, one in stored.items() if not _belongs(name, found)} | found


def _belongs(name: str, found: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tensor is part of a quantised weight, such as ``X.weight.absmax`` and ``X.SCB``."""
    layer = re.sub(r"\.(SCB|weight_format)$|(?<=\.weight)\..*", "", name)
    return layer in found or (layer != name and f"{layer}.weight" in found)


def _four_bit(weight: str, state: bytes, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    try:
        quant_state = json.loads(state)
        packing = Packing(
            tuple(quant_state["shape"]), quant_state["dtype"], quant_state["blocksize"],
            quant_state.get("nested_blocksize", 0), quant_state.get("nested_offset", 0.0),
        )  # fmt: skip
        names = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if packing.nested_block else ()))
        parts = {name: stored[f"{weight}.{name}"] for name in names}
        one, dtype = stored[weight], _NAMES[packing.dtype]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{weight}: its quant_state is not that of bitsandbytes: lacks {error}") from error
    return one.changed(lambda packed: packing.unpack(packed, dict(from_files(parts)(names))), dtype, packing.shape)


def _int8(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    weight, layout = name.removesuffix("SCB") + "weight", name.removesuffix("SCB") + "weight_format"
    one, scale = stored.get(weight), {name: stored[name]}
    if one is None or one.dtype != "I8" or stored[name].shape != one.shape[:1]:
        raise CheckpointError(f"{name}: found scales, but {weight} is no int8 matrix of as many rows")
    if layout in stored and int(next(from_files(stored)([layout]))[1]):
        raise CheckpointError(
            f"{layout}: found a layout of an old bitsandbytes other than rows; save the checkpoint again with 0.45 "
            "or later"
        )

    def change(numbers: Tensor) -> Tensor:
        _, scales = next(from_files(scale)([name]))
        return numbers * scales.float().view(-1, 1) * _INT8_STEP

    return one.changed(change, "F32")


def _check(folder: Path, quantized: list[str]) -> None:
    """Compare ``quantization_config`` with the weights that are quantised."""
    path = folder / "config.json"
    stated = read_json(path).get("quantization_config") if path.is_file() else None
    config = Fields(stated or {}, f"{path}: quantization_config", "save the checkpoint unquantised")
    config.expect("quant_method", "bitsandbytes")
    if (config.get("load_in_4bit") or config.get("load_in_8bit")) and not quantized:
        raise CheckpointError(f"{config.where}: says that weights are quantised, but none is; remove the entry")
    skipped = config.get("llm_int8_skip_modules") or []
    wrong = [name for name in quantized if any(_is(name.removesuffix(".weight"), one) for one in skipped)]
    if wrong:
        what = list_some("weights are quantised although llm_int8_skip_modules has them", wrong)
        raise CheckpointError(f"{config.where}: {what}; the file was damaged or edited")
    config.finish(_HARMLESS)


def _is(layer: str, skipped: str) -> bool:
    """Return whether ``llm_int8_skip_modules`` means a layer, as in transformers 5 (``should_convert_module``)."""
    return re.match(rf"{skipped}(\.|$)", layer) is not None or layer.endswith(f".{skipped}")
