"""The engine of flow-matching policies: turns images, prompts and noise into chunks, with CUDA graphs."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vla_ros.errors import ConfigError
from vla_ros.types import Float32Array, IntArray, RawImage
from vla_ros_models.engine.device_errors import NotFiniteError
from vla_ros_models.engine.flow import FirstStep, FlowModel, fill_cross, prefill_flow, sample, sample_by_gradient
from vla_ros_models.engine.graph_engine import Buckets, GraphEngine, StageClock, StageGraphs
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.passes import Passes, flow_passes
from vla_ros_models.engine.runner import Runner, TransferBuffer
from vla_ros_models.engine.stream import Guide, KVCache

STAGES = ("vision", "prefill", "flow")
PROMPT_STEP = 32
"""Tokens between padded prompt lengths."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """Real-time chunking: how a chunk continues the previous one."""

    previous: NDArray[Any]  # [H, A], normalised; zeros after the previous chunk's last action
    weights: NDArray[Any]  # [H], how strongly each action is pulled towards the previous one
    limit: float = 10.0  # maximum factor of that correction
    given: int = 0  # number of first actions that are copied from ``previous``


@dataclass(frozen=True, eq=False)
class FlowRequest:
    """The network's inputs for one observation."""

    # One image per available camera, in the model's order: either all [S, S, 3] in the engine's type, or all camera
    # images of any size, which the device rotates and resizes.
    images: Sequence[NDArray[Any] | RawImage]
    tokens: IntArray  # int64 [L], the prompt
    # Makes the state [S], normalised and padded, while the device encodes images; pi0.5 does not read it.
    make_state: Callable[[], NDArray[Any]]
    # Noise [H, A], or the seed of a generator on the device; the same seed gives the same chunk.
    noise: NDArray[Any] | int
    continuation: Continuation | None = None  # real-time chunking; None leaves the chunk free
    # Float32 [images, patches, 3], metres, NaN where unknown; None for a model without geometric tokens.
    positions: Float32Array | None = None


@dataclass(frozen=True, eq=False)
class FlowAnswer:
    """The engine's result for one observation."""

    actions: Float32Array  # float32 [H, A], normalised
    # Stage times, the same for all observations of a batch: ``upload`` (of images), ``preprocess`` (of camera
    # images), ``vision``, ``prefill`` (begins with the upload of all other inputs; the first flow step runs in
    # parallel), ``flow`` (ends with the download).
    stages_ms: dict[str, float] = field(default_factory=dict)


class ChunkGraphs(StageGraphs):
    """Graphs whose stages are :data:`STAGES`; subclasses set these and the buffers.

    ``prefill`` begins with the copy of ``inputs`` to the device, ``flow`` ends with that of ``answer`` to the host.
    """

    inputs: TransferBuffer  # everything but images and noise
    noise: torch.Tensor  # float32 [B, H, A]
    answer: TransferBuffer  # the chunks, float32 [B, H, A]

    @property
    def actions(self) -> torch.Tensor:
        return self.answer.tensors[0]

    def clear(self) -> None:
        """Zero buffers that attention masks: a masked value is multiplied by 0, and a NaN would remain."""


class FlowGraphs(ChunkGraphs):
    """The graphs of a :class:`~vla_ros_models.engine.flow.FlowModel`, with a KV cache.

    ``inputs`` are tokens, lengths, state, and the :class:`~vla_ros_models.engine.stream.Guide`'s tensors, in upload
    order.
    """

    def __init__(
        self,
        model: FlowModel,
        ops: Ops,
        size: tuple[int, int],
        dtype: torch.dtype,
        sizes: tuple[int, int],
        length: int,
        jacobian: bool,
        runner: Runner,
    ) -> None:
        batch, cameras = sizes
        device, horizon, numbers = model.device, model.horizon, model.action_dim
        self._model, self._ops, self._jacobian, self._runner = model, ops, jacobian, runner
        self.images = torch.zeros(batch * cameras, *size, 3, dtype=dtype, device=device)
        self.inputs = TransferBuffer(
            device,
            ((batch, length), torch.int64),
            ((batch,), torch.int32),
            ((batch, model.state_dim), torch.float32),
            ((batch, horizon, numbers), torch.float32),
            ((batch, horizon), torch.float32),
            ((batch,), torch.float32),
            ((batch, horizon), torch.int32),
        )
        self.positions = None
        if model.geometry is not None:
            self.positions = torch.full((batch * cameras, model.patches, 3), torch.nan, device=device)
        self.noise = torch.zeros(batch, horizon, numbers, device=device)
        self.answer = TransferBuffer(device, ((batch, horizon, numbers), torch.float32))
        patches = cameras * model.patches
        if patches + length + model.suffix > len(model.prefix.cosine):
            most = (len(model.prefix.cosine) - length - model.suffix) // model.patches
            raise ConfigError(f"{cameras} images found, but the model has positions for only {most}")
        self._patches = model.embedding.new_zeros(batch, patches, model.prefix.shape.hidden_size)
        self._cache = KVCache.in_blocks(model.prefix, batch, patches + length + model.suffix)
        self._cross = KVCache.in_blocks(model.expert, batch, patches + length) if model.crosses else None
        self.stages = {"vision": self._vision, "prefill": self._prefill, "flow": self._flow}

    def clear(self) -> None:
        for cache in (self._cache, self._cross):
            for part in () if cache is None else (*cache.keys, *cache.values):
                part.zero_()

    def _vision(self) -> None:
        tokens = self._model.encode(self.images)
        if self._model.geometry is not None and self.positions is not None:
            tokens = tokens + self._model.geometry(self.positions).to(tokens.dtype)
        self._patches.copy_(tokens.view_as(self._patches))

    def _prefill(self) -> None:
        """Run the prefix pass and, in parallel, the first flow step; its layers wait for those of the prefix."""
        self.inputs.load()
        tokens, lengths, state, *guide = self.inputs.tensors
        model, cache, cross, start = self._model, self._cache, self._cross, lengths + self._patches.shape[1]
        arguments, beside = (model, self._ops, cache, self._patches, tokens, lengths), self._runner.beside
        if self._jacobian:
            return prefill_flow(*arguments, lambda layer: fill_cross(model, self._ops, cache, cross, layer), state)
        with beside():
            first = FirstStep(model, self._ops, cache, start, self.noise, state, Guide(*guide), self.actions, cross)

        def ready(layer: int) -> None:
            with beside():
                first.run_layer(layer)

        prefill_flow(*arguments, ready, state)
        self._runner.join()

    def _flow(self) -> None:
        _, lengths, state, *guide = self.inputs.tensors
        start = lengths + self._patches.shape[1]
        arguments = self._model, self._ops, self._cache, start
        if self._jacobian:
            self.actions.copy_(sample_by_gradient(*arguments, self.noise, state, Guide(*guide), self._cross))
        else:
            self.actions.copy_(sample(*arguments, self.actions, state, Guide(*guide), 1, self._cross))
        self.answer.store()


K = TypeVar("K", bound=Hashable)
B = TypeVar("B", bound=ChunkGraphs)


class ChunkEngine(GraphEngine[K, B]):
    """Runs B observations at a time through the stages of :data:`STAGES`. Not thread-safe."""

    def __init__(
        self, device: torch.device, size: tuple[int, int], buckets: Buckets, runner: Runner | None = None
    ) -> None:
        super().__init__(device, size, buckets, runner)
        self._generator = torch.Generator(device)  # of the noise

    @abstractmethod
    def kind(self, requests: Sequence[FlowRequest]) -> K:
        """Return what all requests of a batch have in common; batches of one kind share their graphs."""

    @abstractmethod
    def _load_images(self, graphs: B, requests: Sequence[FlowRequest], clock: StageClock) -> None:
        """Upload the images of a batch."""

    @abstractmethod
    def _fill(self, arrays: Sequence[NDArray[Any]], row: int, request: FlowRequest) -> None:
        """Write everything but images and noise into ``arrays``, those of :attr:`ChunkGraphs.inputs`."""

    def answer(self, requests: Sequence[FlowRequest]) -> list[FlowAnswer | NotFiniteError]:
        """Compute chunks for B observations of one kind.

        Returns NotFiniteError instead of each chunk with NaN or Inf.

        Raises:
            ConfigError: A prompt is too long, there are too many images, images and camera images are mixed, or the
                device cannot run a camera image's processor.
            ImageError: A camera image has no pixels.
            OutOfMemoryError: The device ran out of memory; retrying is allowed.
            DeviceLostError: The device failed, now or earlier.
        """
        return self._run(partial(self._answer, requests))

    def _answer(self, requests: Sequence[FlowRequest]) -> list[FlowAnswer | NotFiniteError]:
        graphs = self._of(self.kind(requests)).take(max(len(request.tokens) for request in requests))
        clock = StageClock(self.runner)
        self._load_images(graphs, requests, clock)
        for stage in STAGES:
            graphs.stages[stage]()
            clock.end(stage)
            if stage == "vision":
                self._fill_inputs(graphs, requests)  # while the device encodes the images
        chunks = graphs.answer.arrays[0]
        _are_finite(chunks)  # of earlier chunks: what runs once while the host waits is in its caches afterwards
        stages = clock.milliseconds()  # waits stage by stage, so that only the last one is left to read at the end
        answers = [
            FlowAnswer(one.copy(), stages) if finite else NotFiniteError("the chunk holds")
            for one, finite in zip(chunks, _are_finite(chunks), strict=True)
        ]
        if any(isinstance(one, NotFiniteError) for one in answers):
            graphs.clear()  # later requests mask this one's entries, but NaN times zero is NaN
        return answers

    def _fill_inputs(self, graphs: B, requests: Sequence[FlowRequest]) -> None:
        arrays = graphs.inputs.cleared()
        for row, request in enumerate(requests):
            self._fill(arrays, row, request)
            if isinstance(request.noise, np.ndarray):
                self.runner.upload(graphs.noise[row], np.ascontiguousarray(request.noise, np.float32))
            else:
                graphs.noise[row].normal_(generator=self._generator.manual_seed(request.noise))


def _are_finite(chunks: NDArray[Any]) -> list[bool]:
    return [bool(np.isfinite(one).all()) for one in chunks]


class FlowEngine(ChunkEngine[tuple[int, int], FlowGraphs]):
    """The engine of a :class:`~vla_ros_models.engine.flow.FlowModel`; a batch's kind is (B, cameras).

    Images are ``size`` (height, width), those that are already resized of type ``dtype``: uint8, or float32 in
    [0, 1]. Prompts have at most ``prompt`` tokens. ``runner`` defaults to that of the model's device. With
    ``jacobian``, chunks are guided by the gradient of the error; torch then computes the flow steps, several times
    more slowly.
    """

    def __init__(
        self,
        model: FlowModel,
        size: tuple[int, int],
        prompt: int,
        ops: Ops,
        dtype: torch.dtype = torch.uint8,
        runner: Runner | None = None,
        jacobian: bool = False,
    ) -> None:
        lengths = tuple(range(PROMPT_STEP, prompt + PROMPT_STEP, PROMPT_STEP))
        super().__init__(model.device, size, Buckets(0, 1, lengths), runner)
        self.model = model
        self._ops, self._size, self._dtype, self._jacobian = ops, size, dtype, jacobian

    def passes(self, ops: Ops, layers: int) -> Passes:
        return flow_passes(self.model, ops, min(64, self.buckets.lengths[-1]), layers)

    def warm_up(self, prompts: Sequence[int], cameras: int, batch: int = 1) -> None:
        """Capture graphs for prompts of these lengths in tokens, before the first request."""
        self._capture((batch, cameras), prompts)

    def kind(self, requests: Sequence[FlowRequest]) -> tuple[int, int]:
        return len(requests), len(requests[0].images)

    def _load_images(self, graphs: FlowGraphs, requests: Sequence[FlowRequest], clock: StageClock) -> None:
        self._upload([image for request in requests for image in request.images], graphs.images, clock)
        if graphs.positions is not None:
            found = [one.positions for one in requests if one.positions is not None]
            self.runner.upload(graphs.positions, np.concatenate(found))

    def _fill(self, arrays: Sequence[NDArray[Any]], row: int, request: FlowRequest) -> None:
        tokens, lengths, state, *guide = arrays
        lengths[row] = len(request.tokens)
        tokens[row, : lengths[row]] = request.tokens
        state[row] = request.make_state()
        fill_guide(guide, row, request.continuation)

    def _build(self, kind: tuple[int, int], length: int) -> FlowGraphs:
        with torch.inference_mode():
            return FlowGraphs(
                self.model, self._ops, self._size, self._dtype, kind, length, self._jacobian, self.runner
            )


def fill_guide(guide: Sequence[NDArray[Any]], row: int, follow: Continuation | None) -> None:
    """Write how a chunk continues the previous one into the arrays of :class:`~.stream.Guide`."""
    previous, weights, limit, given = guide
    if follow is not None:
        previous[row], weights[row], limit[row] = follow.previous, follow.weights, follow.limit
        given[row, : follow.given] = 1
