"""Builds :class:`~vla_ros_models.groot.network.GrootModel` from the tensors of a checkpoint.

The engine's kernels for few rows know norms without a mean. A layer norm ignores the mean of its inputs, so
:func:`with_few_rows` takes it out of all that is added to the head's stream: the residual products, and the tokens
of state and actions. The rows then have a mean of 0, where a layer norm is an RMS norm.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine import fp8
from vla_ros_models.engine.shapes import DecoderShape
from vla_ros_models.engine.weights import DecoderWeights, Layer, Matrix
from vla_ros_models.groot.architecture import EMBEDDINGS, HEAD, LANGUAGE, VISION, GrootArchitecture
from vla_ros_models.groot.network import TIME_PERIOD, GrootModel, Linear, Merger, SharedKeyValue

TARGET_LAYERS = ("target_time_mlp_in", "target_time_mlp_out")
"""Layers of a distilled flow for the time at which a step ends."""

Get = Callable[..., Tensor]
"""Returns the tensor of a name; the other arguments are its stored shape."""

LayerParts = Mapping[str, Sequence[tuple[Tensor, ...]]]
"""Weight and bias of a layer's norms, and of the linear layers that form each matrix, by role."""


class StoredTensors:
    """The tensors of a checkpoint, read in the order of the file by their names and shapes.

    Of a tensor with an entry for each embodiment, ``get`` may return only the chosen one's, [1, ...].
    """

    def __init__(self, sizes: GrootArchitecture, get: Get) -> None:
        vision, text, connector, inner = sizes.vision, sizes.text, sizes.connector, sizes.head.hidden_size
        width, merged = vision.blocks.hidden_size, vision.blocks.hidden_size * vision.merge**2

        def pair(name: str, *size: int) -> Linear:
            """Return weight and bias of a linear layer [outputs, inputs] or a norm [width]."""
            return get(f"{name}.weight", *size), get(f"{name}.bias", size[0])

        def bare(name: str, *size: int) -> tuple[Tensor]:
            return (get(f"{name}.weight", *size),)

        def each(name: str, inputs: int, outputs: int) -> Linear:
            count = sizes.embodiments
            return get(f"{HEAD}{name}W", count, inputs, outputs), get(f"{HEAD}{name}b", count, outputs)

        def tower_block(stem: str) -> LayerParts:
            hidden = vision.blocks.intermediate_size
            return {
                "norms": [pair(f"{stem}{name}", width) for name in ("norm1", "norm2")],
                "qkv": [pair(f"{stem}attn.qkv", 3 * width, width)],
                "o_proj": [pair(f"{stem}attn.proj", width, width)],
                "gate_up": [pair(f"{stem}mlp.linear_fc1", hidden, width)],
                "down_proj": [pair(f"{stem}mlp.linear_fc2", width, hidden)],
            }

        def text_layer(stem: str) -> LayerParts:
            size, hidden, attention = text.hidden_size, text.intermediate_size, f"{stem}self_attn."
            queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
            rows = {"q": queries, "k": keys, "v": keys}
            return {
                "norms": [bare(f"{stem}{name}", size) for name in ("input_layernorm", "post_attention_layernorm")],
                "qk_norms": [bare(f"{attention}{name}_norm", text.head_dim) for name in "qk"],
                "qkv": [bare(f"{attention}{name}_proj", count, size) for name, count in rows.items()],
                "o_proj": [bare(f"{attention}o_proj", size, queries)],
                "gate_up": [bare(f"{stem}mlp.{name}_proj", hidden, size) for name in ("gate", "up")],
                "down_proj": [bare(f"{stem}mlp.down_proj", size, hidden)],
            }

        def block(stem: str, shape: DecoderShape, source: int) -> LayerParts:
            """Read a block of diffusers that attends to tokens of ``source`` features."""
            size, hidden, inputs = shape.hidden_size, shape.intermediate_size, {"k": source, "v": source}
            return {
                "qkv": [pair(f"{stem}attn1.to_{name}", size, inputs.get(name, size)) for name in "qkv"],
                "o_proj": [pair(f"{stem}attn1.to_out.0", size, size)],
                "gate_up": [pair(f"{stem}ff.net.0.proj", hidden, size)],
                "down_proj": [pair(f"{stem}ff.net.2", size, hidden)],
            }

        def connector_block(stem: str, shape: DecoderShape) -> LayerParts:
            norms = ("norm1", "norm3")
            found = block(stem, shape, shape.hidden_size)
            return {**found, "norms": [pair(f"{stem}{name}", shape.hidden_size) for name in norms]}

        def head_block(stem: str, source: int) -> LayerParts:
            return {**block(stem, sizes.head, source), "norms": [pair(f"{stem}norm1.linear", 2 * inner, inner)]}

        def merger(stem: str, norm: int) -> Merger:
            first = pair(f"{stem}norm", norm), pair(f"{stem}linear_fc1", merged, merged)
            return Merger(*first, pair(f"{stem}linear_fc2", vision.out_width, merged))

        self.side = get(f"{VISION}pos_embed.weight", vision.side**2, width)
        patch = vision.frames, vision.patch_size, vision.patch_size
        self.patch = pair(f"{VISION}patch_embed.proj", width, 3, *patch)
        self.embedding = get(EMBEDDINGS[0], text.vocab_size, text.hidden_size)
        self.tower = [tower_block(f"{VISION}blocks.{index}.") for index in range(vision.blocks.layers)]
        self.mergers = [merger(f"{VISION}merger.", width)]
        for index in range(len(vision.deepstack)):
            self.mergers.append(merger(f"{VISION}deepstack_merger_list.{index}.", merged))
        self.text = [text_layer(f"{LANGUAGE}layers.{index}.") for index in range(text.layers)]
        self.normed = pair(f"{HEAD}vlln", text.hidden_size) if sizes.normed else None
        self.connector, stem = [], f"{HEAD}vl_self_attention.transformer_blocks."
        if connector is not None:
            self.connector = [connector_block(f"{stem}{index}.", connector) for index in range(connector.layers)]
        self.head, stem = [], f"{HEAD}model.transformer_blocks."
        for index in range(sizes.head.layers):
            source = text.hidden_size if index in sizes.crossing else inner
            self.head.append(head_block(f"{stem}{index}.", source))
        stem = f"{HEAD}model.timestep_encoder.timestep_embedder."
        self.time = pair(f"{stem}linear_1", inner, 256), pair(f"{stem}linear_2", inner, inner)
        self.target = [pair(f"{HEAD}{name}", inner, inner) for name in TARGET_LAYERS] if sizes.targets else []
        self.last = pair(f"{HEAD}model.proj_out_1", 2 * inner, inner)
        self.out = pair(f"{HEAD}model.proj_out_2", sizes.output, inner)
        first = each("state_encoder.layer1.", sizes.state_dim, sizes.hidden)
        self.state = first, each("state_encoder.layer2.", sizes.hidden, inner)
        first = each("action_encoder.W1.", sizes.action_dim, inner)
        second = each("action_encoder.W2.", 2 * inner, inner)
        self.action = first, second, each("action_encoder.W3.", inner, inner)
        first = each("action_decoder.layer1.", sizes.hidden, sizes.hidden)
        self.velocity = first, each("action_decoder.layer2.", sizes.hidden, sizes.action_dim)
        self.places = None
        if sizes.positions:
            self.places = get(f"{HEAD}position_embedding.weight", sizes.positions, inner)


def tensor_shapes(sizes: GrootArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the stored shape of every tensor that the passes use, by NVIDIA's names."""
    found: dict[str, tuple[int, ...]] = {}
    nothing = torch.empty(0)

    def note(name: str, *shape: int) -> Tensor:
        found[name] = shape
        return nothing

    StoredTensors(sizes, note)
    return found


@torch.no_grad()
def build_model(
    sizes: GrootArchitecture, tensors: Mapping[str, Tensor], steps: int, quantization: str = "none"
) -> GrootModel:
    """Return the model of tensors by NVIDIA's names; those of all embodiments hold only the chosen one's, [1, ...].

    ``quantization`` (``none`` or ``fp8``) is that of the language model's matrices, output projections excepted.
    """
    stored = StoredTensors(sizes, lambda name, *shape: tensors[name])
    inner, patch = sizes.head.hidden_size, stored.patch
    like = patch[1]

    def norms(parts: LayerParts) -> list[Tensor]:
        return [torch.stack(one).float()[None] for one in parts["norms"]]

    def decoder(shape: DecoderShape, layers: Sequence[Layer], norms: Iterable[Tensor]) -> DecoderWeights:
        none = like.new_empty(0, shape.head_dim // 2)
        return DecoderWeights(shape, tuple(layers), tuple(norms), none, none)

    def stack(shape: DecoderShape, blocks: Sequence[LayerParts]) -> DecoderWeights:
        return decoder(shape, [make_layer(one) for one in blocks], chain(*map(norms, blocks)))

    text_norms = [one[0] for parts in stored.text for one in parts["norms"]]
    times = [int(step / steps * sizes.time_buckets) for step in range(steps)]
    at = torch.tensor(times, dtype=torch.float32)
    condition = condition_on(at, *stored.time)
    if sizes.targets:
        condition = condition + ending(torch.cat([at[1:], at.new_tensor([sizes.time_buckets])]), *stored.target)
    layers = [make_layer(parts, crosses=index in sizes.crossing) for index, parts in enumerate(stored.head)]
    crossing = _stack_crossing(sizes, layers)
    head_norms = chain(*(_head_norms(condition, *parts["norms"][0]) for parts in stored.head))
    last_shift, last_scale = modulation(condition, stored.last)
    first, second, third = map(_wide, stored.action)
    moment = sines(torch.tensor(times, dtype=torch.float32), inner, inner // 2).to(like.device).double()
    bias = moment @ second[0][:, inner:].T + second[0][:, :inner] @ first[1] + second[1]
    out, (decode, velocity) = stored.out, map(_wide, stored.velocity)
    places = like.new_zeros(1, 1) if stored.places is None else stored.places[: sizes.horizon]
    state = [_single(_wide(layer)) for layer in stored.state]
    return GrootModel(
        sizes=sizes,
        vision=stack(sizes.vision.blocks, stored.tower),
        patch=(patch[0].float().sum(2).flatten(1).to(like.dtype), like),
        side=stored.side,
        mergers=tuple(stored.mergers),
        text=decoder(sizes.text, [make_layer(parts, quantization) for parts in stored.text], text_norms),
        embedding=stored.embedding,
        rotary=_rotary_axes(sizes, like.device),
        normed=stored.normed,
        connector=None if sizes.connector is None else stack(sizes.connector, stored.connector),
        head=decoder(sizes.head, layers, head_norms),
        crossing=crossing,
        last=(1 + last_scale, last_shift),
        state=(state[0], state[1]),
        action_in=(second[0][:, :inner] @ first[0]).float(),
        action_bias=bias.float(),
        action_mlp=_single(third),
        positions=places.float(),
        action_out=(
            _single((decode[0] @ out[0].double(), decode[0] @ out[1].double() + decode[1])),
            _single(velocity),
        ),
        steps=steps,
    )


def _matrix(role: str, parts: Sequence[tuple[Tensor, ...]], kind: str = "none") -> Matrix:
    weight = torch.cat([one[0] for one in parts]) if len(parts) > 1 else parts[0][0]
    bias = torch.cat([one[1] for one in parts]) if len(parts[0]) > 1 else None
    inputs = int(weight.shape[1])
    if kind == "none" or role == "o_proj":
        return Matrix(weight, "dense", inputs, role, bias=bias)
    data, scale = fp8.quantize(weight)
    return Matrix(data, "fp8_rows", inputs, role, scale[:, 0].contiguous(), bias=bias)


def make_layer(parts: LayerParts, kind: str = "none", crosses: bool = False) -> Layer:
    """Return a layer; one that ``crosses`` has keys and values of other tokens."""
    qkv, norms = parts["qkv"], [one[0] for one in parts.get("qk_norms", ())]
    o_proj, gate_up, down_proj = (_matrix(role, parts[role], kind) for role in ("o_proj", "gate_up", "down_proj"))
    return Layer(
        _matrix("qkv", qkv[:1] if crosses else qkv, kind),
        o_proj,
        gate_up,
        down_proj,
        qk_norms=(norms[0], norms[1]) if norms else None,
        cross=(_matrix("qkv", qkv[1:2]), _matrix("qkv", qkv[2:])) if crosses else None,
    )


def _wide(layer: Linear) -> Linear:
    """Return a layer of the embodiment as float64 weight [outputs, inputs] and bias."""
    return layer[0][0].double().T, layer[1][0].double()


def _head_norms(condition: Tensor, *layer: Tensor) -> list[Tensor]:
    """Return scale and shift of a block's first norm at each time, and of its second, which has none."""
    scale, shift = modulation(condition, (layer[0], layer[1]))
    plain = torch.stack([torch.ones_like(shift[:1]), torch.zeros_like(shift[:1])], dim=1)
    return [torch.stack([1 + scale, shift], dim=1).contiguous(), plain]


def _stack_crossing(sizes: GrootArchitecture, layers: list[Layer]) -> tuple[SharedKeyValue, ...]:
    """Stack the projections of blocks that attend to the same tokens; the blocks keep views of the stacks."""
    found = []
    for text_only in (True, False) if sizes.alternate else (None,):
        chosen = tuple(one for one in sizes.crossing if text_only in (None, sizes.sees_text(one)))
        if not chosen:
            continue
        pairs = [both for one in chosen if (both := layers[one].cross) is not None]
        every = [both[which] for which in (0, 1) for both in pairs]
        stacked = torch.cat([one.data for one in every])
        bias = torch.cat([one.bias for one in every if one.bias is not None])
        found.append(SharedKeyValue(chosen, stacked, bias))
        rows = torch.split(stacked, [one.outputs for one in every])
        for index, key, value, both in zip(chosen, rows, rows[len(chosen) :], pairs, strict=False):
            layers[index] = replace(layers[index], cross=(replace(both[0], data=key), replace(both[1], data=value)))
    return tuple(found)


def _single(layer: Linear) -> Linear:
    return layer[0].float().contiguous(), layer[1].float()


def _rotary_axes(sizes: GrootArchitecture, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = sizes.text
    place = torch.arange(shape.head_dim // 2)
    axes = torch.zeros_like(place)
    for axis in (1, 2):
        axes.masked_fill_((place % 3 == axis) & (place < 3 * sizes.sections[axis]), axis)
    return axes.to(device), (1.0 / shape.rope_theta ** (2 * place.float() / shape.head_dim)).to(device)


def sines(times: Tensor, width: int, divisor: int) -> Tensor:
    """Embed times [T] as sines, then cosines, [T, width]."""
    angles = times[:, None] * torch.exp(
        torch.arange(width // 2, device=times.device).float() * (-math.log(TIME_PERIOD) / divisor)
    )
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def condition_on(times: Tensor, first: Linear, second: Linear) -> Tensor:
    """Return SiLU of the embedded times [T], float32 [T, width], on which all norms of the head depend."""
    sine, cosine = sines(times, 256, 127).chunk(2, dim=-1)
    embedded = torch.cat([cosine, sine], dim=-1).to(first[0].device)
    for weight, bias in (first, second):
        embedded = functional.silu(functional.linear(embedded, weight.float(), bias.float()))
    return embedded


def ending(times: Tensor, first: Linear, second: Linear) -> Tensor:
    """Return what the times [T] at which the steps of a distilled flow end add to the condition, [T, width]."""
    width = first[0].shape[1]
    embedded = functional.silu(functional.linear(sines(times, width, width // 2).to(first[0].device), *first))
    return functional.linear(embedded, *second)


def modulation(condition: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
    """Return both halves of a linear function of the condition, float32 [T, width] each."""
    first, second = functional.linear(condition, layer[0].float(), layer[1].float()).chunk(2, dim=-1)
    return first, second


@torch.no_grad()
def with_few_rows(model: GrootModel) -> GrootModel:
    """Return the model with weights for few rows; chunks change by rounding only.

    Sizes that are no multiples of 16 have no such kernels; the model is returned unchanged.
    """
    shape = model.head.shape
    if any(size % 16 for size in (shape.hidden_size, shape.intermediate_size, shape.head_dim)):
        return model
    layers = tuple(
        replace(layer, o_proj=_centered(layer.o_proj), down_proj=_centered(layer.down_proj))
        for layer in model.head.layers
    )
    head = replace(model.head, layers=layers)
    scale, shift = model.last
    weight, bias = model.action_out[0]
    return replace(
        model,
        head=head,
        few=_few_rows(head, scale, model.horizon + 1),
        few_bias=functional.linear(shift, weight, bias).contiguous(),
        state=(model.state[0], _without_mean(model.state[1])),
        action_mlp=_without_mean(model.action_mlp),
        positions=(model.positions - model.positions.mean(-1, keepdim=True))
        .expand(model.horizon, shape.hidden_size)
        .contiguous(),
    )


def _few_rows(head: DecoderWeights, last: Tensor, rows: int) -> DecoderWeights:
    """Return the head with kernels' norms; ``last`` [steps, N] is the scale of the norm after it."""
    steps = len(last)
    ones = torch.ones(steps, 1, head.shape.hidden_size, device=head.layers[0].qkv.data.device)
    final = torch.cat([last[:, None], 0 * ones, ones], dim=1)
    # One tensor: a kernel finds the gate of a norm, which is 1, before the scale of the next.
    norms = torch.stack(
        [torch.cat([norm.expand(steps, -1, -1), ones], dim=1) for norm in head.norms] + [final], dim=1
    ).contiguous()

    def finished(index: int, layer: Layer) -> Layer:
        first, second = norms[:, 2 * index, 1], norms[:, 2 * index + 1, 1]
        return replace(layer, shifts=(_shifted(layer.qkv, first), _shifted(layer.gate_up, second)))

    # Rotated by no angle, because the kernel that stores queries and keys rotates.
    angles = torch.zeros(rows, head.shape.head_dim // 2, dtype=head.dtype, device=norms.device)
    return DecoderWeights(
        replace(head.shape, norm="rms_float32", rotary=True),
        tuple(finished(index, layer) for index, layer in enumerate(head.layers)),
        norms.unbind(1),
        angles.cos(),
        angles.sin(),
    )


def _shifted(matrix: Matrix | None, shift: Tensor) -> Tensor:
    """Return the products of a norm's shift with a weight, and its bias: float32 [steps, outputs]."""
    assert matrix is not None
    bias = None if matrix.bias is None else matrix.bias.float()
    return functional.linear(shift, matrix.data.float(), bias)


def _without_mean(layer: Linear) -> Linear:
    """Take the mean over the outputs out of a linear layer, in float32."""
    weight, bias = (one.float() for one in layer)
    return weight - weight.mean(0), bias - bias.mean()


def _centered(matrix: Matrix | None) -> Matrix:
    assert matrix is not None
    bias = matrix.data.new_zeros(matrix.outputs) if matrix.bias is None else matrix.bias
    weight, bias = (one.to(matrix.data.dtype) for one in _without_mean((matrix.data, bias)))
    return replace(matrix, data=weight, bias=bias)
