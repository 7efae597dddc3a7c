"""The weights of GR00T N1.7 and its passes, over the one decoder of :mod:`vla_ros.engine.decoder`.

Vision tower, language model, connector and action head are four descriptions. What depends on the flow time alone
is computed when the weights are loaded, and consecutive linear layers without an activation between them are one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine import fp8
from vla_ros.engine.decoder import run_layer, write_cross
from vla_ros.engine.ops import Ops
from vla_ros.engine.shapes import DecoderShape
from vla_ros.engine.stream import Cross, KVCache, Positions
from vla_ros.engine.tile_configs import SKINNY
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
from vla_ros.policies.groot.parts import Grid, Linear, Merger, condition_on, modulation, sines

_PERIOD = 10000.0


@dataclass(frozen=True, eq=False)
class GrootModel:
    """Weights and constants; the encoders and decoders are those of one embodiment, float32."""

    sizes: GrootArchitecture
    vision: DecoderWeights
    patch: Linear  # [width, 3 * patch * patch]
    side: Tensor  # [side * side, width], learned positions
    mergers: tuple[Merger, ...]  # of the last block, then of each block of DeepStack
    text: DecoderWeights
    embedding: Tensor  # [vocabulary, width]
    normed: Linear | None  # layer norm before the connector
    connector: DecoderWeights | None
    head: DecoderWeights  # norms have an entry for each step
    last: tuple[Tensor, Tensor]  # [steps, width] each: scale and shift of the head's last norm
    state: tuple[Linear, Linear]  # layers of the state's encoder, with a ReLU between them
    action_in: Tensor  # [width, A]
    action_bias: Tensor  # [steps, width]
    action_mlp: Linear  # after a SiLU
    positions: Tensor  # [H, width], added to the actions' tokens
    action_out: tuple[Linear, Linear]  # from the head's last norm to the velocity, with a ReLU between them
    steps: int
    # The head as kernels for few rows take it, see :mod:`~vla_ros.policies.groot.head`; None without such kernels.
    few: DecoderWeights | None = None

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def action_dim(self) -> int:
        return self.sizes.action_dim

    @property
    def horizon(self) -> int:
        return self.sizes.horizon

    def grid(self, rows: int, columns: int) -> Grid:
        """Return positions for images of ``rows`` times ``columns`` patches."""
        vision, device = self.sizes.vision, self.device
        down, across = (torch.linspace(0, vision.side - 1, count) for count in (rows, columns))
        table = self.side.float().view(vision.side, vision.side, -1)

        def between(table: Tensor, at: Tensor) -> Tensor:
            low = at.int().long().to(device)
            share = (at - at.int()).to(device)[:, None, None]
            return table[low] * (1 - share) + table[(low + 1).clamp(max=vision.side - 1)] * share

        embedded = between(between(table, down).transpose(0, 1), across).transpose(0, 1)  # [rows, columns, width]
        half = vision.blocks.head_dim // 2
        speed = 1.0 / _PERIOD ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = torch.cat([place[..., None] * speed for place in places], dim=-1).to(device)
        embedded, angles = (self._in_units(one) for one in (embedded, angles))
        dtype = self.vision.dtype
        return Grid(embedded.to(dtype), *(one.to(dtype)[None, :, None] for one in (angles.cos(), angles.sin())))

    def _in_units(self, table: Tensor) -> Tensor:
        """Reorder [rows, columns, N] to [rows * columns, N] with the patches of one token side by side."""
        merge = self.sizes.vision.merge
        rows, columns, width = table.shape
        units = table.view(rows // merge, merge, columns // merge, merge, width)
        return units.transpose(1, 2).reshape(rows * columns, width)

    def encode(self, ops: Ops, images: Tensor, grid: Grid) -> list[Tensor]:
        """Encode uint8 images [N, H, W, 3] of one size.

        Returns the tokens [N, T, width], and for each level of DeepStack what is added to them.
        """
        vision, weights = self.sizes.vision, self.vision
        patch, merge = vision.patch_size, vision.merge
        count, height, width, _ = images.shape
        pixels = (images.to(torch.float32) - 127.5) / 127.5
        cut = pixels.view(
            count, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3
        ).permute(0, 1, 4, 2, 5, 7, 3, 6)
        rows = cut.reshape(count, -1, 3 * patch * patch).to(weights.dtype)
        cache = KVCache.allocate(weights, count, rows.shape[1], layers=1)
        positions = everywhere(rows, grid.cosine, grid.sine)
        stream = ops.start(weights, functional.linear(rows, *self.patch) + grid.embedded, positions)
        levels = []
        for index in range(len(weights.layers)):
            stream = run_layer(weights, ops, cache, index, stream, positions)
            if index in vision.deepstack:
                levels.append(self.mergers[1 + vision.deepstack.index(index)](stream.hidden))
        return [self.mergers[0](stream.hidden), *levels]

    def read(
        self, ops: Ops, tokens: Tensor, places: Tensor, images: Tensor, levels: Sequence[Tensor], positions: Tensor
    ) -> Tensor:
        """Run the language model; return hidden states [B, L, width] before its last norm.

        ``tokens`` are int64 [B, L] with padding at the end; ``places``, int64 [N], are the rows of all B * L that
        hold the image tokens ``images`` [N, width] and ``levels``; ``positions`` are int64 [B, 3, L].
        """
        weights = self.text
        hidden = functional.embedding(tokens, self.embedding)
        flat = hidden.flatten(0, 1).index_copy(0, places, images.to(hidden.dtype))
        cache = KVCache.allocate(weights, len(tokens), tokens.shape[1], layers=1)
        at = everywhere(hidden, *self._rotary(positions), causal=True)
        stream = ops.start(weights, flat.view_as(hidden), at)
        for index in range(len(weights.layers)):
            stream = run_layer(weights, ops, cache, index, stream, at)
            if index < min(len(levels), len(weights.layers) - 1):  # the head reads the last layer's own output
                flat = stream.hidden.flatten(0, 1).index_add(0, places, levels[index].to(hidden.dtype))
                stream = ops.start(weights, flat.view_as(hidden), at, stream.norm)
        return stream.hidden

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [B, L, 1, head_dim / 2] of M-RoPE, whose frequencies take turns."""
        shape, sections = self.sizes.text, self.sizes.sections
        place = torch.arange(shape.head_dim // 2, device=self.device)
        axes = torch.zeros_like(place)  # made on the device: graphs cannot hold copies from the host
        for axis in (1, 2):
            axes.masked_fill_((place % 3 == axis) & (place < 3 * sections[axis]), axis)
        speed = 1.0 / shape.rope_theta ** (2 * place.float() / shape.head_dim)
        angles = positions.index_select(1, axes).transpose(1, 2)[:, :, None].float() * speed
        return angles.cos().to(self.text.dtype), angles.sin().to(self.text.dtype)

    def connect(self, ops: Ops, hidden: Tensor, valid: Tensor) -> Tensor:
        """Return what the head attends to, [B, L, width]; ``valid``, bool [B, 1, 1, L], is False for padding."""
        if self.normed is not None:
            hidden = functional.layer_norm(hidden, hidden.shape[-1:], *self.normed, eps=1e-5)
        if self.connector is None:
            return hidden
        cache = KVCache.allocate(self.connector, len(hidden), hidden.shape[1], layers=1)
        at = replace(everywhere(hidden), mask=valid)
        stream = ops.start(self.connector, hidden, at)
        for index in range(len(self.connector.layers)):
            stream = run_layer(self.connector, ops, cache, index, stream, at)
        return stream.hidden

    def cross(self, cache: KVCache, tokens: Tensor, valid: Tensor, image: Tensor) -> Tensor:
        """Write the keys and values of ``tokens`` [B, L, width] to the cache of the cross-attention blocks.

        ``valid`` and ``image``, bool [B, L], tell which tokens are no padding, and of images. The tokens that a
        block attends to come first; returns how many: int32 [2, B], of blocks that attend to text and to images.
        """
        seen = (valid & ~image, valid & image) if self.sizes.alternate else (valid, valid)
        # The order of keys does not matter: they have no positions.
        ordered = [_chosen_first(tokens, one) for one in seen]
        for index, layer in enumerate(self.head.layers):
            if layer.cross is not None:
                chosen = ordered[0 if self.sizes.sees_text(index) else 1]
                write_cross(self.head, cache, index, chosen, chosen)
        return torch.stack([one.sum(1, dtype=torch.int32) for one in seen])

    def crosses(self, ops: Ops, cache: KVCache, ends: Tensor) -> tuple[Cross, Cross]:
        """Return what blocks attend to that attend to text and to images; ``ends`` come from :meth:`cross`."""
        rows, length = self.horizon + 1, cache.keys[0].shape[2]
        like = self.state[1][1].new_empty(ends.shape[1], rows, 0)
        begun, few = everywhere(like, length=length), self._few(ops, ends.shape[1])
        if few is not None:
            text, image = (
                few[1].locate_prefix(few[0], cache, begun.at, end[:, None].expand_as(begun.at).contiguous())
                for end in ends
            )
            return Cross(cache, text), Cross(cache, image)
        # Added to the scores, in their type: attention would convert a boolean mask again in every layer.
        hidden = torch.arange(length, device=ends.device) >= ends[:, :, None]
        added = torch.zeros(hidden.shape, dtype=self.head.dtype, device=ends.device)
        text, image = (
            replace(begun, mask=one[:, None, None]) for one in added.masked_fill(hidden, float("-inf")).unbind()
        )
        return Cross(cache, text), Cross(cache, image)

    def _few(self, ops: Ops, batch: int) -> tuple[DecoderWeights, Ops] | None:
        """Return weights and operations of a flow step of few rows, if there are any."""
        found = None if self.few is None or ops.few is None else (self.few, ops.few)
        return found if batch * (self.horizon + 1) <= SKINNY else None

    def encode_state(self, state: Tensor) -> Tensor:
        """Return the state's token [B, 1, width], float32, for a normalised state [B, state_dim]."""
        first, second = self.state
        return functional.linear(functional.linear(state, *first).relu(), *second)[:, None]

    def velocity(self, ops: Ops, crosses: tuple[Cross, Cross], state: Tensor, actions: Tensor, step: int) -> Tensor:
        """Return the velocity, float32 [B, H, A], of noisy actions.

        ``crosses`` come from :meth:`crosses`, ``state`` from :meth:`encode_state`.
        """
        sizes = self.sizes
        rows = functional.silu(functional.linear(actions, self.action_in, self.action_bias[step]))
        rows = functional.linear(rows, *self.action_mlp) + self.positions
        rows = torch.cat([state, rows], dim=1).to(self.head.dtype)
        weights, chosen = self._few(ops, len(actions)) or (self.head, ops)
        own = KVCache.in_blocks(weights, len(actions), rows.shape[1], layers=1)
        here = replace(everywhere(rows), step=step)
        if weights is self.few:
            times, ends = torch.full_like(here.at, step), torch.full_like(here.at, rows.shape[1])
            here = chosen.locate_prefix(weights, own, here.at, ends, times, step)
        stream = chosen.start(weights, rows, here)
        for index in range(len(weights.layers)):
            cross = crosses[0 if not sizes.alternate or sizes.sees_text(index) else 1]
            stream = run_layer(weights, chosen, own, index, stream, here, cross=cross)
        scale, shift = (part[step] for part in self.last)
        wide = functional.layer_norm(stream.hidden[:, 1:].float(), scale.shape, eps=1e-6) * scale + shift
        first, second = self.action_out
        return functional.linear(functional.linear(wide, *first).relu(), *second)


def _chosen_first(tokens: Tensor, chosen: Tensor) -> Tensor:
    """Reorder ``tokens`` [B, L, width] so that those of ``chosen``, bool [B, L], come first."""
    first = chosen.cumsum(1)
    place = torch.where(chosen, first - 1, first[:, -1:] + (~chosen).cumsum(1) - 1)
    return torch.empty_like(tokens).scatter_(1, place[..., None].expand_as(tokens), tokens)


def everywhere(
    hidden: Tensor, cosine: Tensor | None = None, sine: Tensor | None = None, causal: bool = False, length: int = 0
) -> Positions:
    """Return positions of a pass over all rows of ``hidden`` [B, R, N], which see ``length`` or R positions."""
    batch, rows, _ = hidden.shape
    at = torch.arange(rows, dtype=torch.int32, device=hidden.device).expand(batch, rows).contiguous()
    cosine, sine = (hidden.new_empty(0) if one is None else one for one in (cosine, sine))
    return Positions(at, cosine, sine, prompt=True, end=length or rows, causal=causal)


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
    blocks = decoder(head, [block(stem, index in sizes.crossing) for index, stem in enumerate(stems)], norms)
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
        normed=pair(f"{HEAD}vlln") if sizes.normed else None,
        connector=connector,
        head=blocks,
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
