"""The weights of GR00T N1.7 and its passes, over the one decoder of :mod:`vla_ros_models.engine.decoder`.

Vision tower, language model, connector and action head are four descriptions. What depends on the flow time alone
is computed when the weights are loaded, and consecutive linear layers without an activation between them are one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine.decoder import run_layer, run_layers
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.stream import CACHE_BLOCK, Cross, KVCache, Positions, Stream
from vla_ros_models.engine.tile_configs import SKINNY
from vla_ros_models.engine.weights import DecoderWeights
from vla_ros_models.groot.architecture import GrootArchitecture

Linear = tuple[Tensor, Tensor]
"""Weight [outputs, inputs] and bias [outputs]."""

RunLayer = Callable[[DecoderWeights, Ops, KVCache, int, Stream, Positions], Stream]
"""Runs a layer of a decoder, as :func:`~vla_ros_models.engine.decoder.run_layer`."""

TIME_PERIOD = 10000.0
LAST_EPS = 1e-6
"""Epsilon of the head's last norm."""


@dataclass(frozen=True, eq=False)
class Merger:
    """Merges neighbouring patches into one token of the language model."""

    norm: Linear  # of a layer norm over a patch, or over all merged patches
    first: Linear
    second: Linear

    def __call__(self, patches: Tensor) -> Tensor:
        """Map patches [N, P, width] to tokens [N, P / merged, out_width]."""
        inputs = self.first[0].shape[1]
        rows = patches.reshape(len(patches), -1, self.norm[0].shape[0])
        rows = functional.layer_norm(rows, rows.shape[-1:], *self.norm, eps=1e-6).view(len(patches), -1, inputs)
        return functional.linear(functional.gelu(functional.linear(rows, *self.first)), *self.second)


@dataclass(frozen=True, eq=False)
class Grid:
    """What the vision tower adds to the patches of images of one size, in the order of its tokens."""

    embedded: Tensor  # [P, width], learned positions
    cosine: Tensor  # [1, P, 1, head_dim / 2]
    sine: Tensor  # the same


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
    rotary: tuple[Tensor, Tensor]  # [head_dim / 2] each: M-RoPE's axis, int64, and angle per position
    normed: Linear | None  # layer norm before the connector
    connector: DecoderWeights | None
    head: DecoderWeights  # norms have an entry for each step
    crossing: tuple["SharedKeyValue", ...]  # blocks that attend to text, then to images; or all crossing blocks
    last: tuple[Tensor, Tensor]  # [steps, width] each: scale and shift of the head's last norm
    state: tuple[Linear, Linear]  # layers of the state's encoder, with a ReLU between them
    action_in: Tensor  # [width, A]
    action_bias: Tensor  # [steps, width]
    action_mlp: Linear  # after a SiLU
    positions: Tensor  # [H, width], added to the actions' tokens
    action_out: tuple[Linear, Linear]  # from the head's last norm to the velocity, with a ReLU between them
    steps: int
    # The head as kernels for few rows take it (:mod:`~vla_ros_models.groot.building`); None without such kernels.
    few: DecoderWeights | None = None
    few_bias: Tensor | None = None  # [steps, N]: the first bias of ``action_out``, with the last norm's shift

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
        speed = 1.0 / TIME_PERIOD ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
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

    def encode(self, ops: Ops, images: Tensor, grid: Grid, layer: RunLayer = run_layer) -> list[Tensor]:
        """Encode uint8 images [N, H, W, 3] of one size; ``layer`` runs each layer.

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
            stream = layer(weights, ops, cache, index, stream, positions)
            if index in vision.deepstack:
                levels.append(self.mergers[1 + vision.deepstack.index(index)](stream.hidden))
        return [self.mergers[0](stream.hidden), *levels]

    def read(
        self,
        ops: Ops,
        tokens: Tensor,
        places: Tensor,
        images: Tensor,
        levels: Sequence[Tensor],
        positions: Tensor,
        layer: RunLayer = run_layer,
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
            stream = layer(weights, ops, cache, index, stream, at)
            if index < min(len(levels), len(weights.layers) - 1):  # the head reads the last layer's own output
                flat = stream.hidden.flatten(0, 1).index_add(0, places, levels[index].to(hidden.dtype))
                stream = ops.start(weights, flat.view_as(hidden), at, stream.norm)
        return stream.hidden

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [B, L, 1, head_dim / 2] of M-RoPE, whose frequencies take turns."""
        axes, speed = self.rotary
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
        return run_layers(self.connector, ops, cache, ops.start(self.connector, hidden, at), at).hidden

    def store(self, batch: int, length: int) -> "Store":
        """Return room for the keys and values of ``length`` tokens."""
        shape, capacity = self.head.shape, -(-length // CACHE_BLOCK) * CACHE_BLOCK
        parts = tuple(
            self.embedding.new_zeros(2, len(one.blocks), batch, shape.kv_heads, capacity, shape.head_dim)
            for one in self.crossing
        )
        layers = [parts[0].unbind(1)[0]] * self.sizes.head.layers  # blocks that do not cross have other caches
        for part, one in zip(parts, self.crossing, strict=True):
            for index, layer in zip(one.blocks, part.unbind(1), strict=True):
                layers[index] = layer
        counters = self.rotary[0].new_zeros(batch * shape.heads, dtype=torch.int32)
        keys, values = (tuple(layer[which] for layer in layers) for which in (0, 1))
        return Store(parts, KVCache(keys, values, counters))

    def cross(self, store: "Store", tokens: Tensor, valid: Tensor, image: Tensor) -> Tensor:
        """Write the keys and values of ``tokens`` [B, L, width] for the cross-attention blocks.

        ``valid`` and ``image``, bool [B, L], tell which tokens are no padding, and of images. The tokens that a
        block attends to come first; returns how many: int32 [2, B], of blocks that attend to text and to images.
        """
        seen = torch.stack([valid & ~image, valid & image] if self.sizes.alternate else [valid, valid])
        # The order of keys does not matter: they have no positions.
        ordered = _chosen_first(tokens, seen)
        for part, one, chosen in zip(store.parts, self.crossing, ordered, strict=False):
            product = functional.linear(chosen, one.weight, one.bias)
            _, count, batch, heads, _, width = part.shape
            product = product.view(batch, tokens.shape[1], 2, count, heads, width)
            part[..., : tokens.shape[1], :] = product.permute(2, 3, 0, 4, 1, 5)
        return seen.sum(2, dtype=torch.int32)

    def begin(self, ops: Ops, cache: KVCache, ends: Tensor) -> "FlowSteps":
        """Return what the flow steps of a chunk share; ``ends`` come from :meth:`cross`."""
        rows, length = self.horizon + 1, cache.keys[0].shape[2]
        like = self.state[1][1].new_empty(ends.shape[1], rows, 0)
        begun, weights, chosen, has_few = everywhere(like, length=length), self.head, ops, False
        if self.few is not None and ops.few is not None and ends.shape[1] * rows <= SKINNY:
            weights, chosen, has_few = self.few, ops.few, True
        own = KVCache.in_blocks(weights, ends.shape[1], rows, layers=1)
        if has_few:
            at = begun.at
            text, image = (
                chosen.prefix_positions(weights, cache, at, end[:, None].expand_as(at).contiguous()) for end in ends
            )
            here = chosen.prefix_positions(weights, own, at, torch.full_like(at, rows))
            times = torch.arange(self.steps, dtype=torch.int32, device=at.device)[:, None, None]
            steps = tuple(
                replace(here, step=step, time=time)
                for step, time in enumerate(times.expand(-1, *at.shape).contiguous())
            )
            return FlowSteps(weights, chosen, Cross(cache, text), Cross(cache, image), own, steps)
        # Added to the scores, in their type: attention would convert a boolean mask again in every layer.
        hidden = torch.arange(length, device=ends.device) >= ends[:, :, None]
        added = torch.zeros(hidden.shape, dtype=self.head.dtype, device=ends.device)
        text, image = (
            replace(begun, mask=one[:, None, None]) for one in added.masked_fill(hidden, float("-inf")).unbind()
        )
        steps = tuple(replace(everywhere(like), step=step) for step in range(self.steps))
        return FlowSteps(weights, chosen, Cross(cache, text), Cross(cache, image), own, steps)

    def encode_state(self, state: Tensor) -> Tensor:
        """Return the state's token [B, 1, width], float32, for a normalised state [B, state_dim]."""
        first, second = self.state
        return functional.linear(functional.linear(state, *first).relu(), *second)[:, None]

    def advance(self, chunk: "FlowSteps", state: Tensor, actions: Tensor, strength: Tensor, step: int) -> None:
        """Advance noisy actions, float32 [B, H, A], in place by their velocity times ``strength`` [B, H].

        ``chunk`` comes from :meth:`begin`, ``state`` from :meth:`encode_state`.
        """
        sizes, here, weights, ops = self.sizes, chunk.steps[step], chunk.weights, chunk.ops
        stream = ops.start_actions(
            weights, actions, self.action_in, self.action_bias[step], self.action_mlp, here, (state, self.positions)
        )
        for index in range(len(weights.layers)):
            cross = chunk.text if not sizes.alternate or sizes.sees_text(index) else chunk.image
            stream = run_layer(weights, ops, chunk.own, index, stream, here, cross=cross)
        first, second = self.action_out
        if self.few_bias is not None and weights is self.few:
            layers = (first[0], self.few_bias[step]), second
            return ops.finish_mlp(weights, stream, here, layers, LAST_EPS, actions, strength)
        scale, shift = (part[step] for part in self.last)
        wide = functional.layer_norm(stream.hidden[:, 1:].float(), scale.shape, eps=LAST_EPS) * scale + shift
        actions += strength[..., None] * functional.linear(functional.linear(wide, *first).relu(), *second)


@dataclass(frozen=True, eq=False)
class SharedKeyValue:
    """One matrix for the keys and values of all cross-attention blocks that attend to the same tokens."""

    blocks: tuple[int, ...]
    weight: Tensor  # [2 * blocks * heads * head_dim, width]
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Store:
    """Keys and values of the cross-attention blocks."""

    parts: tuple[Tensor, ...]  # keys and values of each :class:`SharedKeyValue`: [2, blocks, B, heads, C, head_dim]
    cache: KVCache  # the same by block


@dataclass(frozen=True, eq=False)
class FlowSteps:
    """What the flow steps of a chunk share."""

    weights: DecoderWeights
    ops: Ops
    text: Cross  # what blocks attend to that attend to text
    image: Cross  # the same for images
    own: KVCache  # keys and values of the rows of a step
    steps: tuple[Positions, ...]  # of the rows, for each step


def _chosen_first(tokens: Tensor, chosen: Tensor) -> Tensor:
    """Reorder ``tokens`` [B, L, width] so that those of each of ``chosen``, bool [N, B, L], come first."""
    first = chosen.cumsum(2)
    place = torch.where(chosen, first - 1, first[..., -1:] + (~chosen).cumsum(2) - 1)
    every = tokens.expand(len(chosen), *tokens.shape)
    return torch.empty_like(every, memory_format=torch.contiguous_format).scatter_(
        2, place[..., None].expand_as(every), every
    )


def everywhere(
    hidden: Tensor, cosine: Tensor | None = None, sine: Tensor | None = None, causal: bool = False, length: int = 0
) -> Positions:
    """Return positions of a pass over all rows of ``hidden`` [B, R, N], which see ``length`` or R positions."""
    batch, rows, _ = hidden.shape
    at = torch.arange(rows, dtype=torch.int32, device=hidden.device).expand(batch, rows).contiguous()
    cosine, sine = (hidden.new_empty(0) if one is None else one for one in (cosine, sine))
    return Positions(at, cosine, sine, prompt=True, end=length or rows, causal=causal)
