"""pi0 and pi0.5 in plain PyTorch, as published code computes them: the baselines of ``vla-ros bench``.

The prompt is padded and masked as in training, every step computes its modulations, and pi0's state token is a row
of every step. It runs eagerly, or with every layer under ``torch.compile`` inside one CUDA graph.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vla_ros_models.engine.flow_engine import FlowRequest
from vla_ros_models.engine.runner import make_runner
from vla_ros_models.pi.network import ROPE_THETA, PiNetwork, euler_times, time_embedding

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Answer = Callable[[FlowRequest], NDArray[np.float32]]


class PlainPi:
    """Computes a chunk in plain PyTorch; ``wrap``, such as ``torch.compile``, is applied to each layer."""

    def __init__(self, network: PiNetwork, steps: int, wrap: Wrap = lambda function: function) -> None:
        self._network, self._times = network, euler_times(steps, summed=True)
        sizes = network.architecture
        self._embedded = [time_embedding(time, sizes.expert.hidden_size, sizes.periods) for time in self._times]
        self._block, self._layer, self._norm = wrap(_block), wrap(_layer), wrap(_norm)

    def __call__(self, images: Tensor, tokens: Tensor, length: Tensor, state: Tensor, noise: Tensor) -> Tensor:
        """Compute one chunk [H, A]; the arguments are those of :meth:`batch` without their first axis."""
        return self.batch(*(one[None] for one in (images, tokens, length, state, noise)))[0]

    @torch.no_grad()
    def batch(self, images: Tensor, tokens: Tensor, length: Tensor, state: Tensor, noise: Tensor) -> Tensor:
        """Compute chunks [B, H, A].

        From uint8 images [B, cameras, S, S, 3], int64 tokens [B, L] (``length`` [B] without padding), float32 state
        [B, A] and noise [B, H, A].
        """
        network, sizes = self._network, self._network.architecture
        patches = self._see(images.flatten(0, 1)).unflatten(0, images.shape[:2]).flatten(1, 2)
        words = network.embed_tokens(tokens) * math.sqrt(sizes.prefix.hidden_size)
        hidden = torch.cat([patches, words], dim=1)  # [B, N, width]
        count = hidden.shape[1]
        places = torch.arange(count, device=hidden.device)
        seen = (places < patches.shape[1] + length[:, None])[:, None]  # [B, 1, N]
        cache = []
        rotary = _rotary(seen.cumsum(-1) - 1, sizes.prefix.head_dim, hidden.dtype)
        layers: list[Any] = list(network.prefix.layers)
        for layer in layers[:-1]:
            norms = (layer.input_norm.parts(places[:1])[0], layer.post_norm.parts(places[:1])[0])
            hidden, kept = self._layer(layer, hidden, norms, rotary, None, seen[:, None])
            cache.append(kept)
        last = layers[-1]
        normed = self._norm(hidden, last.input_norm.parts(places[:1])[0])
        key, value = last.qkv(normed).chunk(2, dim=-1)
        cache.append((_rotate(_heads(key, sizes.prefix.head_dim), rotary), _heads(value, sizes.prefix.head_dim)))

        given = int(sizes.has_state_token)
        rows = sizes.horizon + given
        positions = seen.sum(-1, keepdim=True) + torch.arange(rows, device=hidden.device)
        suffix = _rotary(positions, sizes.prefix.head_dim, hidden.dtype)
        mask = torch.cat([seen, seen.new_ones(len(seen), 1, rows)], dim=-1).expand(-1, rows, -1).clone()
        mask[:, :given, count + given :] = False
        actions = noise
        for embedded in self._embedded:
            actions = actions - self._velocity(actions, state, embedded, cache, suffix, mask) / len(self._times)
        return actions

    def _see(self, images: Tensor) -> Tensor:
        tower = self._network.vision
        tokens = tower.embed(images)
        for block in tower.blocks:
            tokens = self._block(block, tokens)
        embedded: Tensor = self._network.projector(tower.norm(tokens))
        return embedded

    def _velocity(
        self, actions: Tensor, state: Tensor, embedded: Tensor, cache: Any, rotary: Any, mask: Tensor
    ) -> Tensor:
        network = self._network
        embedded = embedded.to(actions.device, non_blocking=True)[None]
        tokens = network.action_in_proj(actions)
        condition = embedded
        if network.architecture.has_state_token:
            both = torch.cat([tokens, embedded.expand_as(tokens)], dim=-1)
            tokens = network.action_time_mlp_out(functional.silu(network.action_time_mlp_in(both)))
            tokens = torch.cat([network.state_proj(state)[:, None], tokens], dim=1)
        else:
            condition = functional.silu(network.time_mlp_out(functional.silu(network.time_mlp_in(embedded))))
        hidden = tokens.to(network.dtype)
        layers: list[Any] = list(network.expert.layers)
        for layer, kept in zip(layers, cache, strict=True):
            norms = (layer.input_norm.parts(condition)[0], layer.post_norm.parts(condition)[0])
            hidden, _ = self._layer(layer, hidden, norms, rotary, kept, mask[:, None])
        last: Any = network.expert.norm
        normed = self._norm(hidden, last.parts(condition)[0])
        velocity: Tensor = network.action_out_proj(normed[:, -actions.shape[1] :].float())
        return velocity


class Plain(Protocol):
    """A model in plain PyTorch, such as :class:`PlainPi`."""

    _embedded: list[Tensor]

    def __call__(self, images: Tensor, tokens: Tensor, length: Tensor, state: Tensor, noise: Tensor) -> Tensor: ...


def eager(make: Callable[[Wrap], Plain], inputs: "Inputs", device: torch.device) -> Answer:
    """Run plain PyTorch operation by operation."""
    plain = make(lambda function: function)
    return lambda request: plain(*(one.to(device) for one in inputs(request))).cpu().numpy()


def compiled(
    make: Callable[[Wrap], Plain],
    inputs: "Inputs",
    request: FlowRequest,
    device: torch.device,
    backend: str = "inductor",
) -> Answer:
    """Run every layer under ``torch.compile``, all in one CUDA graph, with the shapes of ``request``."""
    runner = make_runner(device)
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    plain = make(lambda function: torch.compile(function, dynamic=False, backend=backend))
    plain._embedded = [one.to(device) for one in plain._embedded]
    buffers = [one.to(device) for one in inputs(request)]
    result = torch.zeros_like(buffers[-1])

    def run() -> None:
        result.copy_(plain(*buffers))

    with torch.no_grad(), runner.stream():
        stage = runner.capture(run)

    def answer(request: FlowRequest) -> NDArray[np.float32]:
        with runner.stream():
            for buffer, value in zip(buffers, inputs(request), strict=True):
                runner.upload(buffer, value.numpy())
            stage()
            found: NDArray[np.float32] = runner.download(result)
            return found

    return answer


@dataclass(frozen=True)
class Inputs:
    """Prepares the inputs of plain PyTorch; fields as in ``benchmarks.models.pi.Subject``."""

    prompt: int
    drop_last: bool = False

    def __call__(self, request: FlowRequest) -> list[Tensor]:
        """Return images, padded tokens, their number, state and noise, on the host."""
        count, tokens = len(request.tokens) - int(self.drop_last), np.zeros(self.prompt, np.int64)
        tokens[:count] = request.tokens[:count]
        images = np.stack([np.asarray(image) for image in request.images])
        numbers = [np.asarray(value, np.float32) for value in (request.make_state(), request.noise)]
        return [torch.from_numpy(one) for one in (images, tokens, np.array(count), *numbers)]


def _block(block: Any, tokens: Tensor) -> Tensor:
    tokens = tokens + block.attn(block.norm1(tokens))
    hidden = functional.gelu(block.mlp.fc1(block.norm2(tokens)), approximate="tanh")
    done: Tensor = tokens + block.mlp.fc2(hidden)
    return done


def _norm(hidden: Tensor, parts: Tensor) -> Tensor:
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * parts[0]
    return (wide + parts[1] if len(parts) == 3 else wide).to(hidden.dtype)


def _layer(
    layer: Any, hidden: Tensor, norms: tuple[Tensor, Tensor], rotary: Any, cache: Any, mask: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run one layer over [B, N, width] behind ``cache``; also return its keys and values."""
    size = rotary[0].shape[-1]
    projected = layer.qkv(_norm(hidden, norms[0]))
    query, key, value = projected.split([projected.shape[-1] - 2 * size, size, size], dim=-1)
    query, key = (_rotate(_heads(each, size), rotary) for each in (query, key))
    value = _heads(value, size)
    keys = key if cache is None else torch.cat([cache[0], key], dim=2)
    values = value if cache is None else torch.cat([cache[1], value], dim=2)
    mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    hidden = _add(hidden, layer.o(mixed.transpose(1, 2).flatten(2)), norms[0])
    gate, up = layer.gate_up(_norm(hidden, norms[1])).chunk(2, dim=-1)
    return _add(hidden, layer.down(functional.gelu(gate, approximate="tanh") * up), norms[1]), (key, value)


def _add(hidden: Tensor, branch: Tensor, parts: Tensor) -> Tensor:
    return hidden + (branch * parts[2].to(branch.dtype) if len(parts) == 3 else branch)


def _heads(projected: Tensor, size: int) -> Tensor:
    batch, count, _ = projected.shape
    return projected.view(batch, count, -1, size).transpose(1, 2)


def _rotary(positions: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * ROPE_THETA ** (-steps / size)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]
