"""Flow matching: a prefix pass, then Euler steps of an action expert from noise to a chunk of actions.

Nothing synchronises with the host or branches on a value, so :func:`prefill_flow` and :func:`sample` can be
captured as CUDA graphs. A sequence is image tokens, prompt (SmolVLA: then the state), padding. In the cache, the
suffix (pi0's state token, then the actions) overwrites the padding, so the padding needs no mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine.decoder import run_layer, run_layers
from vla_ros_models.engine.guidance import euler_step, predict_velocity
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.stream import Cross, Guide, KVCache, Positions, Stream
from vla_ros_models.engine.weights import DecoderWeights

_Encode = Callable[[Tensor], Tensor]
"""Encodes images [N, S, S, 3] (uint8, or float32 in [0, 1]) as tokens [N, patches, width]; can be captured."""


@dataclass(frozen=True, eq=False)
class FlowModel:
    """Weights and constants of pi0, pi0.5 or SmolVLA; values that depend only on the flow time are precomputed."""

    encode: _Encode  # vision tower and projector
    embedding: Tensor  # [vocabulary, width], prompt tokens; not scaled
    prefix: DecoderWeights  # decoder over images and prompt
    # Decoder over the suffix. pi0.5's norms have an entry per step, then one for t = 0; others have one.
    expert: DecoderWeights
    action_in: Tensor  # float32 weight [E, A] of the actions; with ``action_mlp``, times its first layer
    action_bias: Tensor  # float32 [steps, E] or [1, E]
    # Float32 weight [E, E] and bias [E] of the layer after SiLU; pi0.5 has none.
    action_mlp: tuple[Tensor, Tensor] | None
    action_out: tuple[Tensor, Tensor]  # float32 weight [A, E] and bias [A]
    state: (
        tuple[Tensor, Tensor] | None
    )  # float32 weight [width, S] and bias [width] of the state token; pi0.5: None
    times: tuple[float, ...]  # flow time of each step, from 1 downwards
    patches: int  # tokens per image
    horizon: int  # H, actions in a chunk
    # True if the state is the prefix's last token, which no other token of the prefix sees; the prompt's tokens end
    # with a placeholder for it. False if it is the first token of the suffix.
    state_in_prefix: bool = False
    causal: bool = False  # True if an action does not see later ones
    # The layer of the prefix that each layer of the expert reads, ascending; empty for the same layers.
    reads: tuple[int, ...] = ()
    # Tokens [N, patches, width] to add to those of ``encode`` for positions [N, patches, 3], NaN where unknown.
    geometry: Callable[[Tensor], Tensor] | None = None

    @property
    def state_row(self) -> bool:
        """True if the suffix begins with the state."""
        return self.state is not None and not self.state_in_prefix

    @property
    def state_dim(self) -> int:
        """S, numbers to which the state is padded."""
        return self.action_dim if self.state is None else int(self.state[0].shape[1])

    @property
    def crosses(self) -> bool:
        """True if layers of the expert attend to projections of the prefix's keys and values."""
        return any(layer.cross is not None for layer in self.expert.layers)

    def reader(self, layer: int) -> int | None:
        """Return the layer of the expert that reads a layer of the prefix, or None."""
        if not self.reads:
            return layer
        return self.reads.index(layer) if layer in self.reads else None

    @property
    def action_dim(self) -> int:
        """A, numbers per action."""
        return int(self.action_out[0].shape[0])

    @property
    def suffix(self) -> int:
        """Rows of a flow step: the actions and, in pi0, the state token."""
        return self.horizon + int(self.state_row)

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def prefill_flow(
    model: FlowModel,
    ops: Ops,
    cache: KVCache,
    patches: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    ready: Callable[[int], None] = lambda layer: None,
    state: Tensor | None = None,
) -> None:
    """Fill the cache from images, prompt and, if it is in the prefix, ``state``, with bidirectional attention.

    ``patches`` [B, P, width] are image tokens; ``tokens``, int64 [B, L], are prompt and padding; ``lengths``, int32
    [B], counts the prompt's tokens. ``ready`` is called with a layer's index once its keys and values are
    available.
    """
    words = functional.embedding(tokens, model.embedding) * model.prefix.shape.hidden_size**0.5
    hidden = torch.cat([patches, words], dim=1)
    batch, count, _ = hidden.shape
    at = torch.arange(count, dtype=torch.int32, device=hidden.device).expand(batch, count).contiguous()
    end = (patches.shape[1] + lengths)[:, None].expand(batch, count).contiguous()
    if model.state_in_prefix and model.state is not None and state is not None:
        before = at < end - 1
        token = functional.linear(state, *model.state).to(hidden.dtype)
        hidden = torch.where((at == end - 1)[..., None], token[:, None], hidden)
        end = torch.where(before, end - 1, end)
    rows = ops.prefix_positions(model.prefix, cache, at, end, torch.zeros_like(at))
    run_layers(model.prefix, ops, cache, ops.start(model.prefix, hidden, rows), rows, ready)


def suffix_rows(model: FlowModel, ops: Ops, cache: KVCache, start: Tensor, given: Tensor) -> list[Positions]:
    """Return the rows of each flow step; ``given``, int32 [B, H], is not 0 for actions whose time is 0.

    ``start``, int32 [B], counts the prefix's tokens. The state token attends to the prefix and itself; an action
    attends to the prefix, the state and all actions (with ``model.causal``, those up to itself).
    """
    at = start[:, None] + torch.arange(model.suffix, dtype=torch.int32, device=start.device)
    end = at + 1 if model.causal else (start + model.suffix)[:, None].expand_as(at).contiguous()
    steps = len(model.times)
    if model.state_row:
        end[:, 0] = start + 1
    if model.action_mlp is not None:  # the time is in the actions' tokens, not in the norms
        return [ops.prefix_positions(model.expert, cache, at, end, torch.zeros_like(at))] * steps
    each = torch.arange(steps, dtype=torch.int32, device=start.device)[:, None, None]
    times = torch.where(given != 0, steps, each).unbind()
    begun = ops.prefix_positions(model.expert, cache, at, end)
    return [replace(begun, time=time, step=step) for step, time in enumerate(times)]


def start_step(model: FlowModel, ops: Ops, actions: Tensor, state: Tensor, rows: Positions, step: int) -> Stream:
    """Begin the expert's stream with noisy actions, float32 [B, H, A]; other arguments as for :func:`sample`."""
    expert = model.expert
    bias = model.action_bias[step if len(model.action_bias) > 1 else 0]
    if model.action_mlp is None or model.state is None or not model.state_row:
        return ops.start_actions(expert, actions, model.action_in, bias, model.action_mlp, rows)
    tokens = functional.silu(functional.linear(actions, model.action_in, bias))
    tokens = functional.linear(tokens, *model.action_mlp)
    tokens = torch.cat([functional.linear(state, *model.state)[:, None], tokens], dim=1)
    return ops.start(expert, tokens.to(expert.dtype), rows)


def run_step(
    model: FlowModel,
    ops: Ops,
    cache: KVCache,
    actions: Tensor,
    state: Tensor,
    rows: Positions,
    step: int,
    cross: Cross | None = None,
) -> Stream:
    """Run the expert on noisy actions up to its last norm; arguments as for :func:`start_step`."""
    stream = start_step(model, ops, actions, state, rows, step)
    return run_layers(model.expert, ops, expert_cache(model, cache), stream, rows, cross=cross)


def expert_cache(model: FlowModel, cache: KVCache) -> KVCache:
    """Return the layers of the prefix's cache that the layers of the expert read."""
    if not model.reads:
        return cache
    keys, values = (tuple(part[layer] for layer in model.reads) for part in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)


def fill_cross(model: FlowModel, ops: Ops, cache: KVCache, cross: KVCache | None, layer: int) -> None:
    """Project a layer of the prefix's cache for the layer of the expert that crosses to it, if one does."""
    index = model.reader(layer)
    if cross is not None and index is not None and model.expert.layers[index].cross is not None:
        ops.write_cross(model.expert, cross, index, cache.keys[layer], cache.values[layer])


def cross_input(model: FlowModel, ops: Ops, cross: KVCache | None, start: Tensor) -> Cross | None:
    """Return what cross-attention layers read: the first ``start`` tokens of the prefix, int32 [B].

    These layers number the suffix's rows from 0. None if the model has no such layers.
    """
    if cross is None:
        return None
    at = torch.arange(model.suffix, dtype=torch.int32, device=start.device).expand(len(start), -1).contiguous()
    ends = start[:, None].expand_as(at).contiguous()
    return Cross(cross, ops.prefix_positions(model.expert, cross, at, ends))


def end_step(
    model: FlowModel, ops: Ops, stream: Stream, actions: Tensor, guide: Guide, rows: Positions, step: int
) -> None:
    """Advance ``actions`` in place to the next time; ``stream`` comes from :func:`run_step`."""
    delta = -1.0 / len(model.times)
    ops.euler_step(model.expert, stream, rows, model.action_out, actions, guide, model.times[step], delta)


class FirstStep:
    """Runs the first flow step one layer at a time, so that it can overlap with the prefix pass.

    ``actions``, float32 [B, H, A], receives the actions after the step; other arguments as for :func:`sample`.
    """

    def __init__(
        self,
        model: FlowModel,
        ops: Ops,
        cache: KVCache,
        start: Tensor,
        noise: Tensor,
        state: Tensor,
        guide: Guide,
        actions: Tensor,
        cross: KVCache | None = None,
    ) -> None:
        self._model, self._ops, self._cache, self._guide, self._actions = model, ops, cache, guide, actions
        self._cross, self._seen = cross, cross_input(model, ops, cross, start)
        actions.copy_(torch.where(guide.given[..., None] != 0, guide.previous, noise))
        self._rows = suffix_rows(model, ops, cache, start, guide.given)[0]
        self._stream = start_step(model, ops, actions, state, self._rows, 0)

    def run_layer(self, layer: int) -> None:
        """Run the layer that reads a layer of the prefix, once its keys are available; the last ends the step."""
        expert, index = self._model.expert, self._model.reader(layer)
        if index is None:
            return
        fill_cross(self._model, self._ops, self._cache, self._cross, layer)
        cache = expert_cache(self._model, self._cache)
        self._stream = run_layer(expert, self._ops, cache, index, self._stream, self._rows, cross=self._seen)
        if index == len(expert.layers) - 1:
            end_step(self._model, self._ops, self._stream, self._actions, self._guide, self._rows, 0)


def sample(
    model: FlowModel,
    ops: Ops,
    cache: KVCache,
    start: Tensor,
    noise: Tensor,
    state: Tensor,
    guide: Guide,
    first: int = 0,
    cross: KVCache | None = None,
) -> Tensor:
    """Sample normalised chunks, float32 [B, H, A], after a prefix.

    ``cache`` comes from :func:`prefill_flow`; every step overwrites the suffix in it. ``start``, int32 [B], counts
    the prefix's tokens without padding. ``noise``, float32 [B, H, A], holds the actions after the steps before
    ``first``. Only pi0 reads ``state``, float32 [B, S], normalised and padded. ``cross`` was filled by
    :func:`fill_cross` for every layer of the prefix.
    """
    actions, seen = (
        torch.where(guide.given[..., None] != 0, guide.previous, noise),
        cross_input(model, ops, cross, start),
    )
    for step, rows in list(enumerate(suffix_rows(model, ops, cache, start, guide.given)))[first:]:
        stream = run_step(model, ops, cache, actions, state, rows, step, seen)
        end_step(model, ops, stream, actions, guide, rows, step)
    return actions


def sample_by_gradient(
    model: FlowModel,
    ops: Ops,
    cache: KVCache,
    start: Tensor,
    noise: Tensor,
    state: Tensor,
    guide: Guide,
    cross: KVCache | None = None,
) -> Tensor:
    """Like :func:`sample`, but guided by the gradient of the weighted error; uses torch instead of ``ops``."""
    ops = Ops()
    with torch.inference_mode(False):  # inference tensors cannot be differentiated, their clones can
        start, state, noise = start.clone(), state.clone(), noise.clone()
        guide = Guide(guide.previous.clone(), guide.weights.clone(), guide.limit.clone(), guide.given.clone())
        actions = torch.where(guide.given[..., None] != 0, guide.previous, noise)
        seen = cross_input(model, ops, None if cross is None else _cloned(cross), start)
        for step, rows in enumerate(suffix_rows(model, ops, cache, start, guide.given)):
            with torch.enable_grad():
                noisy = actions.clone().requires_grad_()
                stream = run_step(model, ops, _cloned(cache), noisy, state, rows, step, seen)
                velocity = predict_velocity(ops.norm(model.expert, stream, rows), model.action_out, model.horizon)
                clean = noisy - model.times[step] * velocity
                error = guide.weights[..., None] * (guide.previous - clean.detach())
                [pull] = torch.autograd.grad(clean, noisy, error)
            euler_step(actions, velocity.detach(), pull, guide, model.times[step], -1.0 / len(model.times))
    return actions


def _cloned(cache: KVCache) -> KVCache:
    keys, values = (tuple(layer.clone() for layer in kind) for kind in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)
