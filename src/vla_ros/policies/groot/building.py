"""Builds :class:`~vla_ros.policies.groot.network.GrootModel` from the tensors of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vla_ros.engine import fp8
from vla_ros.engine.shapes import DecoderShape
from vla_ros.engine.weights import DecoderWeights, Layer, Matrix
from vla_ros.policies.groot.architecture import (
    CONNECTOR,
    DIT,
    EMBEDDINGS,
    HEAD,
    LANGUAGE,
    TIME,
    VISION,
    GrootArchitecture,
)
from vla_ros.policies.groot.network import Crossing, GrootModel
from vla_ros.policies.groot.parts import Linear, Merger, condition_on, modulation, sines


@torch.no_grad()
def build_model(
    sizes: GrootArchitecture, tensors: Mapping[str, Tensor], steps: int, quantization: str = "none"
) -> GrootModel:
    """Return the model of tensors by NVIDIA's names; those of all embodiments hold only the chosen one's, [1, ...].

    ``quantization`` (``none`` or ``fp8``) is that of the language model's matrices, output projections excepted.
    """
    like = tensors[f"{VISION}patch_embed.proj.bias"]

    def pair(name: str) -> Linear:
        return tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def matrix(role: str, *names: str, kind: str = "none") -> Matrix:
        weight = torch.cat([tensors[f"{name}.weight"] for name in names]) if len(names) > 1 else None
        weight = tensors[f"{names[0]}.weight"] if weight is None else weight
        bias = None
        if f"{names[0]}.bias" in tensors:
            bias = torch.cat([tensors[f"{name}.bias"] for name in names])
        inputs = int(weight.shape[1])
        if kind == "none" or role == "o_proj":
            return Matrix(weight, "dense", inputs, role, bias=bias)
        data, scale = fp8.quantize(weight)
        return Matrix(data, "fp8_rows", inputs, role, scale[:, 0].contiguous(), bias=bias)

    def norm(name: str) -> Tensor:
        return torch.stack(pair(name)).float()[None]

    def wide(name: str) -> Linear:
        """Return a layer of the embodiment as float64 weight [outputs, inputs] and bias."""
        return tensors[f"{HEAD}{name}W"][0].double().T, tensors[f"{HEAD}{name}b"][0].double()

    def decoder(shape: DecoderShape, layers: Sequence[Layer], norms: Sequence[Tensor]) -> DecoderWeights:
        none = like.new_empty(0, shape.head_dim // 2)
        return DecoderWeights(shape, tuple(layers), tuple(norms), none, none)

    def block(stem: str, crosses: bool) -> Layer:
        attention = [f"{stem}attn1.to_{name}" for name in "qkv"]
        found = Layer(
            matrix("qkv", *attention[: 1 if crosses else 3]),
            matrix("o_proj", f"{stem}attn1.to_out.0"),
            matrix("gate_up", f"{stem}ff.net.0.proj"),
            matrix("down_proj", f"{stem}ff.net.2"),
        )
        return (
            replace(found, cross=(matrix("qkv", attention[1]), matrix("qkv", attention[2]))) if crosses else found
        )

    vision, text, head = sizes.vision, sizes.text, sizes.head
    stems = [f"{VISION}blocks.{index}." for index in range(vision.blocks.layers)]
    tower = decoder(
        vision.blocks,
        [
            Layer(
                matrix("qkv", f"{stem}attn.qkv"),
                matrix("o_proj", f"{stem}attn.proj"),
                matrix("gate_up", f"{stem}mlp.linear_fc1"),
                matrix("down_proj", f"{stem}mlp.linear_fc2"),
            )
            for stem in stems
        ],
        [norm(f"{stem}{name}") for stem in stems for name in ("norm1", "norm2")],
    )
    stems = [f"{LANGUAGE}layers.{index}." for index in range(text.layers)]
    language = decoder(
        text,
        [
            Layer(
                matrix("qkv", *(f"{stem}self_attn.{name}_proj" for name in "qkv"), kind=quantization),
                matrix("o_proj", f"{stem}self_attn.o_proj"),
                matrix("gate_up", f"{stem}mlp.gate_proj", f"{stem}mlp.up_proj", kind=quantization),
                matrix("down_proj", f"{stem}mlp.down_proj", kind=quantization),
                (tensors[f"{stem}self_attn.q_norm.weight"], tensors[f"{stem}self_attn.k_norm.weight"]),
            )
            for stem in stems
        ],
        [
            tensors[f"{stem}{name}.weight"]
            for stem in stems
            for name in ("input_layernorm", "post_attention_layernorm")
        ],
    )
    connector = None
    if sizes.connector is not None:
        stems = [f"{CONNECTOR}{index}." for index in range(sizes.connector.layers)]
        connector = decoder(
            sizes.connector,
            [block(stem, crosses=False) for stem in stems],
            [norm(f"{stem}{name}") for stem in stems for name in ("norm1", "norm3")],
        )
    times = [int(step / steps * sizes.time_buckets) for step in range(steps)]
    condition = condition_on(times, *(pair(f"{TIME}{name}") for name in ("linear_1", "linear_2")))
    stems = [f"{DIT}{index}." for index in range(head.layers)]
    norms = []
    for stem in stems:
        scale, shift = modulation(condition, pair(f"{stem}norm1.linear"))
        plain = torch.stack([torch.ones_like(shift[:1]), torch.zeros_like(shift[:1])], dim=1)
        norms += [torch.stack([1 + scale, shift], dim=1).contiguous(), plain]
    layers, crossing = [block(stem, index in sizes.crossing) for index, stem in enumerate(stems)], []
    for text_only in (True, False) if sizes.alternate else (None,):
        chosen = tuple(one for one in sorted(sizes.crossing) if text_only in (None, sizes.sees_text(one)))
        if not chosen:
            continue
        found = [both for one in chosen if (both := layers[one].cross) is not None]
        every = [both[which] for which in (0, 1) for both in found]
        stacked = torch.cat([one.data for one in every])
        biases = None if every[0].bias is None else torch.cat([one.bias for one in every if one.bias is not None])
        crossing.append(Crossing(chosen, stacked, biases))
        rows = torch.split(stacked, [one.outputs for one in every])  # the blocks keep no copies
        for index, key, value, both in zip(chosen, rows, rows[len(chosen) :], found, strict=False):
            kept = replace(both[0], data=key), replace(both[1], data=value)
            layers[index] = replace(layers[index], cross=kept)
    blocks = decoder(head, layers, norms)
    last_shift, last_scale = modulation(condition, pair(f"{HEAD}model.proj_out_1"))
    inner = head.hidden_size
    first, second = wide("action_encoder.W1."), wide("action_encoder.W2.")
    moment = sines(torch.tensor(times, dtype=torch.float32), inner, inner // 2).to(like.device).double()
    bias = moment @ second[0][:, inner:].T + second[0][:, :inner] @ first[1] + second[1]
    out, decode = pair(f"{HEAD}model.proj_out_2"), wide("action_decoder.layer1.")
    places = (
        tensors[f"{HEAD}position_embedding.weight"][: sizes.horizon] if sizes.positions else like.new_zeros(1, 1)
    )
    return GrootModel(
        sizes=sizes,
        vision=tower,
        patch=(tensors[f"{VISION}patch_embed.proj.weight"].float().sum(2).flatten(1).to(like.dtype), like),
        side=tensors[f"{VISION}pos_embed.weight"],
        mergers=tuple(
            Merger(*(pair(f"{stem}{name}") for name in ("norm", "linear_fc1", "linear_fc2")))
            for stem in (
                f"{VISION}merger.",
                *(f"{VISION}deepstack_merger_list.{index}." for index in range(len(vision.deepstack))),
            )
        ),
        text=language,
        embedding=tensors[EMBEDDINGS[0]],
        rotary=_rotary_axes(sizes, like.device),
        normed=pair(f"{HEAD}vlln") if sizes.normed else None,
        connector=connector,
        head=blocks,
        crossing=tuple(crossing),
        last=(1 + last_scale, last_shift),
        state=(_single(wide("state_encoder.layer1.")), _single(wide("state_encoder.layer2."))),
        action_in=(second[0][:, :inner] @ first[0]).float(),
        action_bias=bias.float(),
        action_mlp=_single(wide("action_encoder.W3.")),
        positions=places.float(),
        action_out=(
            _single((decode[0] @ out[0].double(), decode[0] @ out[1].double() + decode[1])),
            _single(wide("action_decoder.layer2.")),
        ),
        steps=steps,
    )


def _single(layer: Linear) -> Linear:
    return layer[0].float().contiguous(), layer[1].float()


def _rotary_axes(sizes: GrootArchitecture, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = sizes.text
    place = torch.arange(shape.head_dim // 2)
    axes = torch.zeros_like(place)
    for axis in (1, 2):
        axes.masked_fill_((place % 3 == axis) & (place < 3 * sizes.sections[axis]), axis)
    return axes.to(device), (1.0 / shape.rope_theta ** (2 * place.float() / shape.head_dim)).to(device)
