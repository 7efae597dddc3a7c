"""Flow matching: a prefix pass, then Euler steps of an action expert from noise to a chunk of actions.

Nothing synchronises with the host or branches on a value, so :func:`prefill_flow` and :func:`sample` can be
captured as CUDA graphs. A sequence is image tokens, prompt, padding. In the cache, the suffix (pi0's state token,
then the actions) overwrites the padding, so the padding needs no mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros.engine.decoder import run_layer, run_layers
from vla_ros.engine.ops import Ops, advance, predict_velocity
from vla_ros.engine.stream import Guide, KVCache, Positions, Stream
from vla_ros.engine.weights import DecoderWeights

_Encode = Callable[[Tensor], Tensor]
"""Encodes images [N, S, S, 3] (uint8, or float32 in [0, 1]) as tokens [N, patches, width]; can be captured."""


@dataclass(frozen=True, eq=False)
class FlowModel:
    """Weights and constants of pi0 or pi0.5; values that depend only on the flow time are precomputed."""

    encode: _Encode  # vision tower and projector
    embedding: Tensor  # [vocabulary, width], prompt tokens; not scaled
    prefix: DecoderWeights  # Gemma over images and prompt
    expert: DecoderWeights  # Gemma over the suffix; its norms have an entry per step, then one for t = 0 (pi0: one)
    action_in: Tensor  # float32 weight [E, A] of the actions; for pi0, multiplied by its time MLP's first layer
    action_bias: Tensor  # float32 [steps, E] or [1, E]
    action_mlp: tuple[Tensor, Tensor] | None  # pi0: float32 weight [E, E] and bias [E] of the layer after SiLU
    action_out: tuple[Tensor, Tensor]  # float32 weight [A, E] and bias [A]
    state: tuple[Tensor, Tensor] | None  # pi0: float32 weight [E, A] and bias [E] of the state token
    times: tuple[float, ...]  # flow time of each step, from 1 downwards
    patches: int  # tokens per image
    horizon: int  # H, actions in a chunk

    @property
    def action_dim(self) -> int:
        """A, numbers per action."""
        return int(self.action_out[0].shape[0])

    @property
    def suffix(self) -> int:
        """Rows of a flow step: the actions and, in pi0, the state token."""
        return self.horizon + int(self.state is not None)

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
) -> None:
    """Fill the cache from images and prompt, with bidirectional attention.

    ``patches`` [B, P, width] are image tokens; ``tokens``, int64 [B, L], are prompt and padding; ``lengths``, int32
    [B], counts the prompt's tokens. ``ready`` is called with a layer's index once its keys and values are
    available.
    """
    words = functional.embedding(tokens, model.embedding) * model.prefix.shape.hidden_size**0.5
    hidden = torch.cat([patches, words], dim=1)
    batch, count, _ = hidden.shape
    at = torch.arange(count, dtype=torch.int32, device=hidden.device).expand(batch, count).contiguous()
    end = (patches.shape[1] + lengths)[:, None].expand(batch, count).contiguous()
    rows = ops.locate_prefix(model.prefix, cache, at, end, torch.zeros_like(at))
    run_layers(model.prefix, ops, cache, ops.start(model.prefix, hidden, rows), rows, ready)


def suffix_rows(model: FlowModel, ops: Ops, cache: KVCache, start: Tensor, given: Tensor) -> list[Positions]:
    """Return the rows of each flow step; ``given``, int32 [B, H], is not 0 for actions whose time is 0.

    ``start``, int32 [B], counts the prefix's tokens. The state token attends to the prefix and itself; an action
    attends to the prefix, the state and all actions.
    """
    at = start[:, None] + torch.arange(model.suffix, dtype=torch.int32, device=start.device)
    end = (start + model.suffix)[:, None].expand_as(at).contiguous()
    steps = len(model.times)
    if model.state is not None:
        end[:, 0] = start + 1
        return [ops.locate_prefix(model.expert, cache, at, end, torch.zeros_like(at))] * steps
    each = torch.arange(steps, dtype=torch.int32, device=start.device)[:, None, None]
    times = torch.where(given != 0, steps, each).unbind()
    begun = ops.locate_prefix(model.expert, cache, at, end)
    return [replace(begun, time=time, step=step) for step, time in enumerate(times)]


def start_step(model: FlowModel, ops: Ops, actions: Tensor, state: Tensor, rows: Positions, step: int) -> Stream:
    """Begin the expert's stream with noisy actions, float32 [B, H, A]; other arguments as for :func:`sample`."""
    expert = model.expert
    bias = model.action_bias[step if len(model.action_bias) > 1 else 0]
    if model.action_mlp is None or model.state is None:
        return ops.start_actions(expert, actions, model.action_in, bias, rows)
    tokens = functional.silu(functional.linear(actions, model.action_in, bias))
    tokens = functional.linear(tokens, *model.action_mlp)
    tokens = torch.cat([functional.linear(state, *model.state)[:, None], tokens], dim=1)
    return ops.start(expert, tokens.to(expert.dtype), rows)


def run_step(
    model: FlowModel, ops: Ops, cache: KVCache, actions: Tensor, state: Tensor, rows: Positions, step: int
) -> Stream:
    """Run the expert on noisy actions up to its last norm; arguments as for :func:`start_step`."""
    return run_layers(model.expert, ops, cache, start_step(model, ops, actions, state, rows, step), rows)


def end_step(
    model: FlowModel, ops: Ops, stream: Stream, actions: Tensor, guide: Guide, rows: Positions, step: int
) -> None:
    """Advance ``actions`` in place to the next time; ``stream`` comes from :func:`run_step`."""
    delta = -1.0 / len(model.times)
    ops.advance(model.expert, stream, rows, model.action_out, actions, guide, model.times[step], delta)


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
    ) -> None:
        self._model, self._ops, self._cache, self._guide, self._actions = model, ops, cache, guide, actions
        actions.copy_(torch.where(guide.given[..., None] != 0, guide.previous, noise))
        self._rows = suffix_rows(model, ops, cache, start, guide.given)[0]
        self._stream = start_step(model, ops, actions, state, self._rows, 0)

    def run_layer(self, index: int) -> None:
        """Run one layer, as soon as the prefix's keys of that layer are available; the last layer ends the step."""
        expert = self._model.expert
        self._stream = run_layer(expert, self._ops, self._cache, index, self._stream, self._rows)
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
) -> Tensor:
    """Sample normalised chunks, float32 [B, H, A], after a prefix.

    ``cache`` comes from :func:`prefill_flow`; every step overwrites the suffix in it. ``start``, int32 [B], counts
    the prefix's tokens without padding. ``noise``, float32 [B, H, A], holds the actions after the steps before
    ``first``. Only pi0 reads ``state``, float32 [B, A], normalised and padded.
    """
    actions = torch.where(guide.given[..., None] != 0, guide.previous, noise)
    for step, rows in list(enumerate(suffix_rows(model, ops, cache, start, guide.given)))[first:]:
        end_step(model, ops, run_step(model, ops, cache, actions, state, rows, step), actions, guide, rows, step)
    return actions


def sample_by_gradient(
    model: FlowModel, ops: Ops, cache: KVCache, start: Tensor, noise: Tensor, state: Tensor, guide: Guide
) -> Tensor:
    """Like :func:`sample`, but guided by the gradient of the weighted error; uses torch instead of ``ops``."""
    ops = Ops()
    with torch.inference_mode(False):  # inference tensors cannot be differentiated, their clones can
        start, state, noise = start.clone(), state.clone(), noise.clone()
        guide = Guide(guide.previous.clone(), guide.weights.clone(), guide.limit.clone(), guide.given.clone())
        actions = torch.where(guide.given[..., None] != 0, guide.previous, noise)
        for step, rows in enumerate(suffix_rows(model, ops, cache, start, guide.given)):
            keys, values = (tuple(layer.clone() for layer in kind) for kind in (cache.keys, cache.values))
            with torch.enable_grad():
                noisy = actions.clone().requires_grad_()
                stream = run_step(model, ops, KVCache(keys, values, cache.split_counters), noisy, state, rows, step)
                velocity = predict_velocity(ops.norm(model.expert, stream, rows), model.action_out, model.horizon)
                clean = noisy - model.times[step] * velocity
                error = guide.weights[..., None] * (guide.previous - clean.detach())
                [pull] = torch.autograd.grad(clean, noisy, error)
            advance(actions, velocity.detach(), pull, guide, model.times[step], -1.0 / len(model.times))
    return actions
