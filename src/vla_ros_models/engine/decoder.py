"""The passes of a decoder: one layer, and ``prefill``, ``verify``, ``decode`` and ``parallel`` of a language model.

:mod:`vla_ros_models.engine.flow` has the passes of flow matching. The engine runs them with packed weights and
Triton's operations, the reference path with the loaded weights and torch's operations. Nothing synchronises with
the host: positions are tensors and shapes are fixed, so each function can be captured as a CUDA graph. A language
model's sequence is BOS, patches, the rest of the prompt, drafted tokens, padding. Causal attention hides padding
and drafts from all earlier tokens; their cache entries are overwritten before they are read.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine.ops import Ops, prompt_positions
from vla_ros_models.engine.stream import Cross, KVCache, Positions, Stream
from vla_ros_models.engine.weights import DecoderWeights


def run_layers(
    weights: DecoderWeights,
    ops: Ops,
    cache: KVCache,
    stream: Stream,
    positions: Positions,
    ready: Callable[[int], None] = lambda layer: None,
    cross: Cross | None = None,
) -> Stream:
    """Run a stream through all layers, up to the last norm; overwrites ``stream``. Arguments as for one layer."""
    for index in range(len(weights.layers)):
        stream = run_layer(weights, ops, cache, index, stream, positions, ready, cross)
    return stream


def run_layer(
    weights: DecoderWeights,
    ops: Ops,
    cache: KVCache,
    index: int,
    stream: Stream,
    positions: Positions,
    ready: Callable[[int], None] = lambda layer: None,
    cross: Cross | None = None,
) -> Stream:
    """Run attention and MLP of one layer; overwrites ``stream``.

    A layer without output projection only writes its keys and values. ``ready`` is called with the layer's index
    once they are available. ``cross`` holds the keys that crossing layers attend to.
    """
    layer = weights.layers[index]
    if layer.cross is not None:
        assert cross is not None, "a layer attends to another model's keys, but the pass has none"
        cache, positions = cross.cache, replace(cross.positions, time=positions.time, step=positions.step)
    query = ops.qkv(weights, index, stream, positions, cache)
    ready(index)
    if layer.o_proj is None or layer.down_proj is None:
        return stream
    attended = ops.attend(query, cache, index, positions)
    stream = ops.add(weights, stream, attended, layer.o_proj, positions)
    return ops.add(weights, stream, ops.gate_up(weights, index, stream, positions), layer.down_proj, positions)


def prefill(
    weights: DecoderWeights, ops: Ops, cache: KVCache, patches: Tensor, text: Tensor, last: Tensor, rows: int
) -> Tensor:
    """Run a prompt and the draft after it; fill the cache from position 0.

    ``patches`` are [B, P, hidden]; ``text``, int64 [B, T], is BOS, prompt, draft, padding; ``last``, int32 [B], is
    the position of the prompt's last token in the sequence. Returns float32 logits [B, rows, vocab] of the
    positions from ``last``: row 0 predicts the token after the prompt, row i the token after the i-th drafted
    token.
    """
    hidden = embed_sequence(weights, patches, text)  # [B, S, hidden]
    batch, length, _ = hidden.shape
    prompt = ops.positions(weights, cache, prompt_positions(hidden), prompt=True)
    stream = ops.start(weights, hidden, prompt)
    final = len(weights.layers) - 1
    for index in range(final):
        stream = run_layer(weights, ops, cache, index, stream, prompt)
    # In the last layer, most rows need only keys and values; the few rows with logits run as in decoding.
    ops.qkv(weights, final, stream, prompt, cache)
    wanted = last[:, None] + torch.arange(rows, dtype=torch.int32, device=last.device)  # [B, rows]
    at = wanted + length * torch.arange(batch, device=last.device)[:, None]
    few = ops.gather(weights, stream.hidden.flatten(0, 1), at, stream.norm)
    return ops.lm_head(weights, run_layer(weights, ops, cache, final, few, ops.positions(weights, cache, wanted)))


def verify(weights: DecoderWeights, ops: Ops, cache: KVCache, tokens: Tensor, start: Tensor) -> Tensor:
    """Run R tokens, int64 [B, R], from position ``start``, int32 [B], on top of the cache.

    Returns float32 logits [B, R, vocab]. A row's logits depend only on the rows before it. On a GPU, they are
    bit-identical whether the row runs alone or among R rows.
    """
    positions = start[:, None] + torch.arange(tokens.shape[1], dtype=torch.int32, device=start.device)
    return _pass(weights, ops, cache, tokens, positions)


def decode(
    weights: DecoderWeights, ops: Ops, cache: KVCache, token: Tensor, start: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Decode ``count`` further tokens greedily, one pass each.

    ``token``, int64 [B], is the newest token, at position ``start``, int32 [B]. Returns tokens int64 [B, count] and
    margins float32 [B, count].
    """
    tokens, margins = (
        [token.new_empty(token.shape[0], 0)],
        [start.new_empty(start.shape[0], 0, dtype=torch.float32)],
    )
    positions = start + torch.arange(count, dtype=torch.int32, device=start.device)[:, None]  # [count, B]
    chosen = token[:, None]
    for step in range(count):
        chosen, margin = ops.choose(_pass(weights, ops, cache, chosen, positions[step][:, None]))
        tokens.append(chosen)
        margins.append(margin)
    return torch.cat(tokens, dim=1), torch.cat(margins, dim=1)


def parallel(
    weights: DecoderWeights, ops: Ops, cache: KVCache, sequence: Tensor, wanted: Tensor, length: Tensor | None
) -> Tensor:
    """Run a whole sequence once with bidirectional attention, as in parallel decoding.

    ``sequence`` holds embeddings [B, S, hidden]. Returns the hidden states after the final norm, [B, R, hidden], of
    the rows ``wanted``, int64 [B, R], indices into all B * S rows. ``cache`` has room for S positions; all layers
    may share one layer of it. ``length``, int32 [B], counts the positions before the padding; None means no
    padding.
    """
    final = len(weights.layers) - 1
    everywhere = ops.two_way_positions(weights, cache, prompt_positions(sequence), length)
    stream = ops.start(weights, sequence, everywhere)
    for index in range(final):
        stream = run_layer(weights, ops, cache, index, stream, everywhere)
    # The last layer needs all keys and values, but only the wanted rows of the rest.
    layer = weights.layers[final]
    assert layer.o_proj is not None
    assert layer.down_proj is not None
    query = ops.qkv(weights, final, stream, everywhere, cache).flatten(0, 1)[wanted]
    stream = ops.start(weights, stream.hidden.flatten(0, 1)[wanted], everywhere, stream.norm)
    stream = ops.add(weights, stream, ops.attend(query, cache, final, everywhere), layer.o_proj, everywhere)
    stream = ops.add(weights, stream, ops.gate_up(weights, final, stream, everywhere), layer.down_proj, everywhere)
    return ops.norm(weights, stream)


def hidden_states(weights: DecoderWeights, ops: Ops, sequence: Tensor) -> Tensor:
    """Return the hidden states after the final norm for embeddings [B, S, hidden], with gradients."""
    cache = KVCache.allocate(weights, sequence.shape[0], sequence.shape[1])
    prompt = ops.positions(weights, cache, prompt_positions(sequence), prompt=True)
    return ops.norm(weights, run_layers(weights, ops, cache, ops.start(weights, sequence, prompt), prompt))


def embed_sequence(weights: DecoderWeights, patches: Tensor, text: Tensor) -> Tensor:
    """Embed ``text``, int64 [B, T], and insert ``patches`` [B, P, hidden] after BOS: [B, T + P, hidden]."""
    words = functional.embedding(text, weights.table())
    return torch.cat([words[:, :1], patches.to(words.dtype), words[:, 1:]], dim=1)


def _pass(weights: DecoderWeights, ops: Ops, cache: KVCache, tokens: Tensor, at: Tensor) -> Tensor:
    stream, positions = ops.gather(weights, weights.table(), tokens), ops.positions(weights, cache, at)
    return ops.lm_head(weights, run_layers(weights, ops, cache, stream, positions))
