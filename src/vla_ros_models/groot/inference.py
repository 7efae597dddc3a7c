"""Loads a model, prepares observations for its engine, and continues chunks as GR00T does.

Real-time chunking: the first actions are those left of the previous chunk. Those that will have been executed stay
frozen; the velocity of the others grows from 0 to 1 along an exponential ramp.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.errors import ConfigError, ImageError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.types import FloatArray, RawImage, UInt8Array
from vla_ros_models.engine.device_ops import make_fused_ops
from vla_ros_models.engine.flow_engine import ChunkEngine, ChunkGraphs, Continuation, FlowRequest, fill_guide
from vla_ros_models.engine.graph_engine import Buckets, StageClock
from vla_ros_models.engine.kernel_check import agrees, random_numbers, require_close
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.passes import Passes
from vla_ros_models.engine.runner import Runner, TransferBuffer, make_runner
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.tolerances import TOLERANCES
from vla_ros_models.engine.weights import DecoderWeights
from vla_ros_models.groot.architecture import GrootArchitecture
from vla_ros_models.groot.building import with_few_rows
from vla_ros_models.groot.loading import GrootCheckpoint, load_network
from vla_ros_models.groot.network import Grid, GrootModel
from vla_ros_models.groot.processing import Processing
from vla_ros_models.groot.prompt import PromptEncoder, read_prompt_encoder
from vla_ros_models.normalization import Array
from vla_ros_models.sampling import check_noise

LENGTH_STEP, LONGEST_SEQUENCE = 32, 4096
"""Tokens between padded lengths of image tokens and prompt, and the largest length."""

_Grids = tuple[tuple[int, int], ...]
_Kind = tuple[int, _Grids]


@dataclass(frozen=True, eq=False)
class GrootRequest(FlowRequest):
    """The network's inputs for one observation; ``tokens`` [L] include those of images."""

    # Int64 [3, L], of M-RoPE: time, height and width of each token.
    positions: NDArray[Any] = field(default_factory=lambda: np.zeros((3, 0), np.int64))
    grids: _Grids = ()  # (rows, columns) of patches of each image


class GrootGraphs(ChunkGraphs):
    """The graphs of a :class:`~vla_ros_models.groot.network.GrootModel`.

    ``inputs`` are tokens, their positions, the rows of image tokens, lengths, state, and the tensors of
    :class:`~vla_ros_models.engine.stream.Guide`: the previous actions, 1 - strength of the velocity, 0, and which
    actions start as the previous ones.
    """

    def __init__(self, model: GrootModel, ops: Ops, kind: _Kind, length: int) -> None:
        (batch, grids), sizes, device = kind, model.sizes, model.device
        self._model, self._ops, vision = model, ops, sizes.vision
        patch, merged = vision.patch_size, vision.merge**2
        # Images of one size run as one batch; image tokens are in this order.
        self.images = {
            one: torch.zeros(batch * count, one[0] * patch, one[1] * patch, 3, dtype=torch.uint8, device=device)
            for one, count in Counter(grids).items()
        }
        self._grids: dict[tuple[int, int], Grid] = {one: model.grid(*one) for one in self.images}
        tokens = batch * sum(rows * columns for rows, columns in grids) // merged
        horizon, numbers = sizes.horizon, sizes.action_dim
        self.inputs = TransferBuffer(
            device,
            ((batch, length), torch.int64),
            ((batch, 3, length), torch.int64),
            ((tokens,), torch.int64),
            ((batch,), torch.int32),
            ((batch, sizes.state_dim), torch.float32),
            ((batch, horizon, numbers), torch.float32),
            ((batch, horizon), torch.float32),
            ((batch,), torch.float32),
            ((batch, horizon), torch.int32),
        )
        self.noise = torch.zeros(batch, horizon, numbers, device=device)
        self.answer = TransferBuffer(device, ((batch, horizon, numbers), torch.float32))
        levels = 1 + len(vision.deepstack)
        self._features = model.embedding.new_zeros(levels, tokens, vision.out_width)
        self._state = self.noise.new_zeros(batch, 1, sizes.head.hidden_size)
        self._store = model.store(batch, length)
        self._ends = torch.zeros(2, batch, dtype=torch.int32, device=device)
        self._at = torch.arange(length, device=device)
        self.stages = {"vision": self._vision, "prefill": self._prefill, "flow": self._flow}

    def _vision(self) -> None:
        start = 0
        for one, images in self.images.items():
            levels = self._model.encode(self._ops, images, self._grids[one])
            count = levels[0].shape[0] * levels[0].shape[1]
            for index, level in enumerate(levels):
                self._features[index, start : start + count] = level.flatten(0, 1)
            start += count

    def _prefill(self) -> None:
        self.inputs.load()
        model, (tokens, positions, places, lengths, state, *_) = self._model, self.inputs.tensors
        hidden = model.read(self._ops, tokens, places, self._features[0], list(self._features[1:]), positions)
        valid = self._at < lengths[:, None]
        connected = model.connect(self._ops, hidden, valid[:, None, None])
        self._ends.copy_(model.cross(self._store, connected, valid, tokens == model.sizes.image_token))
        self._state.copy_(model.encode_state(state))

    def _flow(self) -> None:
        model, (*_, previous, held, _, given) = self._model, self.inputs.tensors
        chunk = model.begin(self._ops, self._store.cache, self._ends)
        self.actions.copy_(torch.where(given[..., None] != 0, previous, self.noise))
        strength = (1.0 - held) / model.steps
        for step in range(model.steps):
            model.advance(chunk, self._state, self.actions, strength, step)
        self.answer.store()


class GrootEngine(ChunkEngine[_Kind, GrootGraphs]):
    """The engine of a :class:`~vla_ros_models.groot.network.GrootModel`."""

    def __init__(self, model: GrootModel, size: tuple[int, int], ops: Ops, runner: Runner | None = None) -> None:
        lengths = tuple(range(LENGTH_STEP, LONGEST_SEQUENCE + 1, LENGTH_STEP))
        super().__init__(
            model.device, size, Buckets(0, 1, lengths), make_runner(model.device) if runner is None else runner
        )
        self.model, self._ops = model, ops

    def passes(self, ops: Ops, layers: int) -> Passes:
        """Return two flow steps of one robot in the first pairs of blocks, if they have kernels with tiles."""
        model, few = self.model, Ops()
        if model.few is None:
            return {}
        few.few, noise = ops, random_numbers(0, model.device)
        model = replace(model, head=model.head.first(2 * layers), few=model.few.first(2 * layers))
        cache = KVCache.in_blocks(model.head, 1, 160)
        for part in (*cache.keys, *cache.values):
            part.copy_(noise(*part.shape))
        ends = torch.tensor([[24], [128]], dtype=torch.int32, device=model.device)
        state, actions = noise(1, 1, model.sizes.head.hidden_size), noise(1, model.horizon, model.action_dim)
        strength = torch.ones_like(actions[..., 0])

        def flow() -> Tensor:
            chunk, found = model.begin(few, cache, ends), actions.clone()
            for step in (0, model.steps - 1):
                model.advance(chunk, state, found, strength, step)
            return found

        return {"flow": flow}

    def warm_up(self, lengths: Sequence[int], grids: _Grids, batch: int = 1) -> None:
        """Capture graphs for sequences of these lengths in tokens, before the first request."""
        self._capture((batch, grids), lengths)

    def kind(self, requests: Sequence[FlowRequest]) -> _Kind:
        return len(requests), _of(requests[0]).grids

    def _load_images(self, graphs: GrootGraphs, requests: Sequence[FlowRequest], clock: StageClock) -> None:
        for grid, target in graphs.images.items():
            chosen = [
                image
                for request in requests
                for image, one in zip(request.images, _of(request).grids, strict=True)
                if one == grid
            ]
            self._upload(chosen, target, clock)

    def _fill(self, arrays: Sequence[NDArray[Any]], row: int, request: FlowRequest) -> None:
        tokens, positions, places, lengths, state, *guide = arrays
        count, one = len(request.tokens), _of(request)
        lengths[row] = count
        tokens[row, :count] = request.tokens
        positions[row, :, :count] = one.positions
        state[row] = request.make_state()
        fill_guide(guide, row, request.continuation)
        found = tokens.shape[1] * row + np.flatnonzero(request.tokens == self.model.sizes.image_token)
        places[_order(one.grids, row, len(tokens), self.model.sizes.vision.merge**2)] = found

    def _build(self, kind: _Kind, length: int) -> GrootGraphs:
        with torch.inference_mode():
            return GrootGraphs(self.model, self._ops, kind, length)


def _of(request: FlowRequest) -> GrootRequest:
    assert isinstance(request, GrootRequest)
    return request


@lru_cache(maxsize=64)
def _order(grids: _Grids, row: int, batch: int, merged: int) -> NDArray[np.int64]:
    """Return where the image tokens of an observation are among those of a batch, in the order of the prompt."""
    found: dict[int, NDArray[np.int64]] = {}
    start = 0
    for grid, count in Counter(grids).items():
        tokens = grid[0] * grid[1] // merged
        cameras = [camera for camera, one in enumerate(grids) if one == grid]
        for index, camera in enumerate(cameras):
            found[camera] = start + (row * count + index) * tokens + np.arange(tokens)
        start += batch * count * tokens
    return np.concatenate([found[camera] for camera in range(len(grids))])


def continue_chunk(previous: Array, delay: int, sizes: GrootArchitecture, horizon: int = 0) -> Continuation | None:
    """Return the engine's input that continues ``previous``, normalised [T, N]; None if nothing is left of it.

    ``delay`` actions will have been executed when the new chunk arrives. ``horizon`` limits the actions that the
    new chunk continues; 0: all. Rows of zeros at the end of ``previous`` are padding.
    """
    shape = previous.shape
    if len(shape) != 2 or not 1 <= shape[1] <= sizes.action_dim or not np.isfinite(previous).all():
        raise ConfigError(
            f"RTC: the previous actions have shape {list(shape)}, expected finite numbers "
            f"[T, 1 to {sizes.action_dim}]"
        )
    used = np.flatnonzero(np.abs(previous).sum(axis=1) > 0)
    left = previous[: used[-1] + 1 if len(used) else 0][-sizes.horizon :]
    if not len(left):
        return None
    overlap = min(len(left), horizon or len(left))
    frozen = max(0, min(delay, overlap))
    strength = np.ones(sizes.horizon)
    strength[:frozen] = 0.0
    ramp = 1.0 - np.exp(-sizes.ramp_rate * np.linspace(0.0, 1.0, overlap - frozen + 2))
    strength[frozen:overlap] = (ramp / max(ramp[-1], 1e-8))[1:-1]
    start = np.zeros((sizes.horizon, sizes.action_dim))
    start[:overlap, : shape[1]] = left[len(left) - overlap :]
    return Continuation(start, 1.0 - strength, 0.0, overlap)


@dataclass(frozen=True, eq=False)
class LoadedGroot:
    """A loaded model, which keeps no state between calls."""

    architecture: GrootArchitecture
    engine: GrootEngine
    processing: Processing
    prompt: PromptEncoder

    def request(
        self,
        images: Mapping[str, UInt8Array | RawImage],
        state: FloatArray,
        instruction: str,
        noise: Array | int,
        follow: Continuation | None = None,
    ) -> GrootRequest:
        """Prepare one observation for the engine.

        ``images`` maps keys to images that :class:`~vla_ros_models.groot.processing.GrootResize` has processed,
        or to raw images. ``state`` is float [state_size]. ``noise`` is standard normal, float [horizon,
        action_dim], or a seed; the same noise gives the same chunk.
        """
        sizes, unit = self.architecture, self.architecture.vision.unit
        check_noise(noise, sizes.horizon, sizes.action_dim)
        present = [images[key] for key in self.processing.images if key in images]
        shapes = [self.processing.resize.size if isinstance(one, RawImage) else one.shape[:2] for one in present]
        if wrong := [shape for shape in shapes if shape[0] % unit or shape[1] % unit]:
            raise ImageError(
                f"groot: images of {wrong} pixels, expected multiples of {unit}: process them with the spec's "
                "processor"
            )
        tokens = self.prompt.encode(instruction, [(height // unit, width // unit) for height, width in shapes])
        patch = sizes.vision.patch_size
        return GrootRequest(
            present,
            tokens.tokens,
            partial(self.processing.normalized_state, state, sizes.state_dim),
            noise,
            follow,
            positions=tokens.positions,
            grids=tuple((height // patch, width // patch) for height, width in shapes),
        )


def make_engine(model: GrootModel, size: tuple[int, int], runner: Runner | None = None) -> GrootEngine:
    """Return an engine with the device's operations, or with torch's if a pass differs from torch's."""
    ops = make_fused_ops(model.device)
    model = model if ops.few is None else with_few_rows(model)
    instead = "torch computes the layers instead of the engine's kernels, more slowly"
    if type(ops) is not Ops and not agrees(lambda: check_passes(ops, model), instead, strict=False):
        ops = Ops()
    return GrootEngine(model, size, ops, runner)


@torch.inference_mode()
def check_passes(ops: Ops, model: GrootModel) -> None:
    """Compare the first layers of each transformer with torch's operations.

    Raises EngineMismatchError if a result differs by more than rounding.
    """
    for weights in (model.vision, model.text, model.head, *([model.connector] if model.connector else [])):
        ops.require(weights)

    def first(weights: DecoderWeights, count: int) -> DecoderWeights:
        return replace(weights, layers=weights.layers[:count])

    connector = None if model.connector is None else first(model.connector, 1)
    short = replace(
        model,
        vision=first(model.vision, 1),
        text=first(model.text, 2),
        head=first(model.head, 3),
        few=None
        if model.few is None
        else replace(first(model.few, 3), norms=(*model.few.norms[:6], model.few.norms[-1])),
        connector=connector,
    )
    sizes, noise = model.sizes, random_numbers(0, model.device)
    bounds = TOLERANCES[model.vision.dtype]
    # Eight times what one product may differ by: several layers, and FP8's neighbouring values.
    bounds = replace(bounds, product=8 * bounds.product, element=8 * bounds.element)
    grid = 2 * sizes.vision.merge
    side = grid * sizes.vision.patch_size
    images = (noise(2, side, side, 3) * 60 + 128).clamp(0, 255).to(torch.uint8)
    tokens = torch.arange(16, device=model.device).expand(2, -1).contiguous()
    places, rows = torch.tensor([2, 3, 20, 21], device=model.device), 4 * (1 + len(sizes.vision.deepstack))
    features = noise(rows, sizes.text.hidden_size).to(model.text.dtype).chunk(rows // 4)
    positions = torch.arange(16, device=model.device).expand(2, 3, -1)
    lengths = torch.tensor([16, 11], device=model.device)
    valid = tokens < lengths[:, None]
    hidden = noise(2, 16, sizes.text.hidden_size).to(model.text.dtype)
    state, actions = noise(2, 1, sizes.head.hidden_size), noise(2, sizes.horizon, sizes.action_dim)
    state = state - state.mean(-1, keepdim=True)  # as the weights for few rows make it

    def velocity(ops: Ops, batch: int) -> Tensor:
        """Text and images: the first 2 and the others of the valid tokens."""
        store = short.store(batch, 16)
        ends = short.cross(store, hidden[-batch:], valid[-batch:], tokens[-batch:] > 2)
        chunk, found = short.begin(ops, store.cache, ends), actions[-batch:].clone()
        short.advance(chunk, state[-batch:], found, torch.ones_like(found[..., 0]), model.steps - 1)
        return found

    passes: dict[str, Callable[[Ops], Tensor]] = {
        "the vision tower": lambda ops: short.encode(ops, images, model.grid(grid, grid))[0],
        "the language model": lambda ops: short.read(ops, tokens, places, features[0], features[1:], positions),
        "the connector": lambda ops: short.connect(ops, hidden.clone(), valid[:, None, None])[:, :11],
        "a flow step": lambda ops: velocity(ops, 1),
        "a flow step of several robots": lambda ops: velocity(ops, 2),
    }
    for name, run in passes.items():
        require_close(name, run(ops), run(Ops()), bounds)


def load_model(
    checkpoint: GrootCheckpoint,
    device: str = "cpu",
    dtype: str = "float32",
    flow_steps: int = 0,
    quantization: str = "none",
    progress: Progress = no_progress,
) -> LoadedGroot:
    """Load a checkpoint onto a device; ``flow_steps`` 0 takes the checkpoint's."""
    sizes = checkpoint.architecture
    prompt = read_prompt_encoder(checkpoint.backbone, sizes.image_token, sizes.text.vocab_size, checkpoint.formal)
    model = load_network(checkpoint, device, dtype, flow_steps, quantization, progress)
    engine = make_engine(model, checkpoint.processing.resize.size)
    return LoadedGroot(sizes, engine, checkpoint.processing, prompt)
