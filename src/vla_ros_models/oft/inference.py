"""Runs OpenVLA-OFT on static buffers: as CUDA graphs, or in plain torch without padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vla_ros.types import Float32Array, FloatArray, IntArray, RawImage, UInt8Array
from vla_ros_models.engine.decoder import parallel
from vla_ros_models.engine.device_errors import EngineMismatchError, require_finite
from vla_ros_models.engine.device_ops import make_ops
from vla_ros_models.engine.graph_engine import Buckets, GraphEngine, StageClock, StageGraphs
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.passes import Passes, bidirectional_passes
from vla_ros_models.engine.runner import Runner, TransferBuffer, make_runner
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.tolerances import TOLERANCES, relative_error
from vla_ros_models.engine.weights import DecoderWeights, as_loaded, fuse
from vla_ros_models.oft.network import Denoising, OFTModel, SequencePlan, denoise, plan_sequence, sources
from vla_ros_models.openvla.network import VisionEncoder

END_TOKEN = 2
"""``</s>``, which follows the placeholders."""

_Encode = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Encodes uint8 images [N, H, W, 3], with each tower's modulations (FiLM), as embeddings [N, patches, width]."""


@dataclass(frozen=True)
class Chunk:
    """What the network returned for one observation, before un-normalising."""

    normalized: FloatArray  # float64 [K, D]; undefined for a discrete checkpoint
    tokens: IntArray | None  # int64 [K * D] of a discrete checkpoint, else None
    margins: FloatArray  # best minus second-best logit of each token; empty without tokens
    stages_ms: dict[str, float]  # ``upload``, ``preprocess`` of camera images, ``infer``, ``download``


@dataclass(frozen=True)
class ChunkRequest:
    """The network's inputs for one observation."""

    # Main camera first: all processed, uint8 [H, W, 3] each, or all raw.
    images: Sequence[UInt8Array | RawImage]
    prompt: IntArray  # int64 [L]: BOS, prompt, closing token
    state: NDArray[np.floating] | None = None  # [P], normalised; None if the network takes no state
    noise: NDArray[np.floating] | None = None  # [K, D], initial sample; None without a diffusion head
    # Of the patches, float32 [images, patches, 3], metres, NaN where unknown; None: all of them are.
    positions: Float32Array | None = None


class StepBuffers(StageGraphs):
    """Static buffers for B observations of one padded sequence length, and the stages that run on them.

    ``padded`` is False if no sequence of this length needs a mask.
    """

    def __init__(self, owner: "ChunkInference", length: int, padded: bool, batch: int) -> None:
        self._owner, self.length = owner, length
        model, layout = owner.model, owner.model.layout
        device, width = owner.weights.device, owner.weights.shape.hidden_size
        size = model.architecture.image_size
        self.text = length - owner.fixed - layout.slots
        self.images = torch.zeros(batch * layout.images, size, size, 3, dtype=torch.uint8, device=device)
        actions = (batch, layout.chunk, layout.action)
        self.inputs = TransferBuffer(
            device,
            ((batch, self.text), torch.int64),
            ((batch, length), torch.int64),
            ((batch, layout.slots), torch.int64),
            ((batch,), torch.int32),
            ((batch,), torch.int32),
            ((batch, 1, max(1, layout.state)), torch.float32),
            (actions, torch.float32),
            ((batch, owner.patches if layout.geometry else 0, 3), torch.float32),
        )
        self.words, self.order, self.wanted, self.lengths, self.counts, *rest = self.inputs.tensors
        self.state, self.noise, self.positions = rest
        self.answer = TransferBuffer(device, ((batch, layout.slots), torch.int64), (actions, torch.float32))
        self.tokens, self.numbers = self.answer.tensors
        self.patches = torch.zeros(batch, owner.patches, width, dtype=owner.weights.dtype, device=device)
        self.sample = torch.zeros(actions, dtype=owner.weights.dtype, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.cache = KVCache.allocate(owner.weights, batch, length, layers=1)
        towers = model.vision_backbone.towers if layout.film else []
        self.film = [
            torch.zeros(len(tower.blocks), 2, tower.shape.width, dtype=self.patches.dtype, device=device)
            for tower in towers
        ]
        self._read_words: bytes | None = None  # the text for which ``film`` was computed
        self._padded = padded
        diffusion = layout.head == "diffusion"
        self.sources = 1 + self.text + owner.fixed + (layout.slots if diffusion else 0)
        self.stages = {"encode": self._encode, "denoise": self._denoise} if diffusion else {"whole": self._whole}
        self.repeats = {"encode": 1, "denoise": owner.steps} if diffusion else {"whole": 1}
        if self.film:
            self.stages["read"] = self._read

    def run(self, words: bytes) -> None:
        """Run all stages; FiLM's modulations are recomputed only if the text ``words`` changed."""
        if self.film and self._read_words != words:
            self.stages["read"]()
            self._read_words = words
        for stage, repeats in self.repeats.items():
            for _ in range(repeats):
                self.stages[stage]()

    def _read(self) -> None:
        """Compute the modulations from the mean embedding of the text."""
        inside = torch.arange(self.text, device=self.words.device) < self.counts
        language = (self._embedded()[0] * inside[:, None]).sum(0, keepdim=True) / self.counts
        towers = self._owner.model.vision_backbone.towers
        for buffer, tower in zip(self.film, towers, strict=True):
            buffer.copy_(tower.modulations(language.to(self.patches.dtype)))

    def _whole(self) -> None:
        runner = self._owner.runner
        self._share()
        with runner.beside():  # in parallel with the towers, which do not fill the GPU
            known, geometry = self._known(), self._geometry()
        self._encode_images(geometry)
        states = self._states(*known, [], None)
        if self._owner.model.action_head is not None:
            self.numbers.copy_(self._owner.model.action_head(states).view_as(self.numbers))
            return
        tokens, margins = self._owner.ops.choose(self._owner.ops.logits(self._owner.weights, states))
        self.tokens.copy_(tokens)
        self.numbers.copy_(margins.view_as(self.numbers))

    def _encode(self) -> None:
        self._share()
        with self._owner.runner.beside():
            geometry = self._geometry()
        self._encode_images(geometry)

    def _geometry(self) -> Tensor | None:
        """Return what is added to the patches for where their surfaces are; None without geometric tokens."""
        module = self._owner.model.geometry
        return None if module is None else module(self.positions).to(self.patches.dtype)

    def _share(self) -> None:
        self._owner.ops.share(self.images)
        self._owner.ops.share(self.inputs.buffer)

    def _encode_images(self, geometry: Tensor | None) -> None:
        self.patches.copy_(self._owner.encode(self.images, self.film).view_as(self.patches))
        self._owner.runner.join()
        if geometry is not None:
            self.patches.add_(geometry)
        self.sample.copy_(self.noise)
        self.step.zero_()

    def _denoise(self) -> None:
        owner, step = self._owner, self.step
        projector = owner.model.noisy_action_projector
        assert projector is not None
        assert owner.model.action_head is not None
        assert owner.denoising is not None
        noisy = projector(self.sample.view(len(self.sample), -1, 1))
        time = owner.denoising.times[step].to(self.sample.dtype).expand(len(self.sample), 1, -1)
        noise = owner.model.action_head(self._states(*self._known(), [time], noisy)).view_as(self.sample)
        self.sample.copy_(denoise(self.sample, noise, owner.denoising.alphas[step][0]))
        self.step.add_(1)
        self.numbers.copy_(self.sample)

    def _known(self) -> tuple[Tensor, list[Tensor]]:
        """Embed text and state, which need no image."""
        projector = self._owner.model.proprio_projector
        return self._embedded(), [] if projector is None else [projector(self.state.to(self.patches.dtype))]

    def _states(self, words: Tensor, state: list[Tensor], extras: list[Tensor], noisy: Tensor | None) -> Tensor:
        """Return the hidden states that become actions, [B, K * D, width]."""
        owner = self._owner
        sequence = sources(words, self.patches, [*state, *extras], noisy).flatten(0, 1)[self.order]
        length = self.lengths if self._padded else None
        return parallel(owner.weights, owner.ops, self.cache, sequence, self.wanted, length)

    def _embedded(self) -> Tensor:
        return functional.embedding(self.words, self._owner.weights.table())


class ChunkInference(GraphEngine[int, StepBuffers]):
    """Infers chunks in one bidirectional pass, or in one pass per denoising step. Not thread-safe.

    ``weights`` are the decoder's; the decoder in ``model`` may be empty. Sequences are padded to multiples of
    ``bucket_step``; 1 disables padding.
    """

    def __init__(
        self,
        model: OFTModel,
        weights: DecoderWeights,
        ops: Ops,
        encode: _Encode,
        runner: Runner,
        steps: int = 50,
        bucket_step: int = 32,
    ) -> None:
        layout, most, side = model.layout, weights.shape.max_positions, model.architecture.image_size
        self.patches, self.steps = layout.images * model.architecture.patches, steps
        self.fixed = self.patches + layout.extras
        answer = layout.slots + 2  # placeholders, </s>, and one that Buckets subtracts for a last token
        self._padded = bucket_step > 1
        if self._padded:
            buckets = Buckets.up_to(self.fixed, answer, most, bucket_step)
        else:
            buckets = Buckets(self.fixed, answer, tuple(range(self.fixed + answer, most + 1)))
        super().__init__(weights.device, (side, side), buckets, runner, ops.ranks)
        self.model, self.weights, self.ops, self.encode = model, weights, ops, encode
        self.denoising = None
        if layout.head == "diffusion":
            table = Denoising.of(steps, weights.shape.hidden_size)
            self.denoising = Denoising(*(one.to(weights.device) for one in table))
        self._plans: dict[tuple[int, int], SequencePlan] = {}

    def passes(self, ops: Ops, layers: int) -> Passes:
        return bidirectional_passes(self.weights, ops, self.buckets.lengths[0], layers)

    def warm_up(self, prompts: Sequence[int], batch: int = 1) -> None:
        """Capture graphs for prompts of these token counts; raises ConfigError if one is too long."""
        self._capture(batch, prompts)

    def answer(self, asked: ChunkRequest) -> Chunk:
        [chunk] = self.answer_all([asked])
        return chunk

    def answer_all(self, asked: Sequence[ChunkRequest]) -> list[Chunk]:
        """Answer observations of several robots in one pass, or one by one if :attr:`batches` is False.

        Raises ConfigError if a prompt is too long, NotFiniteError if a chunk contains NaN or Inf, OutOfMemoryError
        (the call may be retried) or DeviceLostError.
        """
        parts = [asked] if self.batches else [[one] for one in asked]
        return self._run(lambda: [chunk for part in parts for chunk in self._answer(part)])

    @property
    def batches(self) -> bool:
        """True if several observations can share a pass; False with FiLM, as the towers then depend on the text."""
        return self._padded and not self.model.layout.film

    def _build(self, kind: int, length: int) -> StepBuffers:
        return StepBuffers(self, length, self._padded, kind)

    def _plan(self, prompt: int, step: StepBuffers) -> SequencePlan:
        key = prompt, step.length
        if key not in self._plans:
            self._plans[key] = plan_sequence(self.model.layout, self.patches, step.text, prompt, step.length)
        return self._plans[key]

    def _answer(self, asked: Sequence[ChunkRequest]) -> list[Chunk]:
        runner, layout = self.runner, self.model.layout
        step = self._of(len(asked)).take(max(len(one.prompt) for one in asked))
        clock = StageClock(runner)
        self._upload([image for one in asked for image in one.images], step.images, clock)
        words, order, wanted, lengths, counts, state, noise, positions = step.inputs.cleared()
        for row, one in enumerate(asked):
            count = len(one.prompt)
            laid_out = self._plan(count, step)
            words[row, :count], words[row, count] = one.prompt, END_TOKEN
            order[row] = laid_out.order + row * step.sources
            wanted[row] = laid_out.wanted + row * step.length
            lengths[row], counts[row] = laid_out.length, count + 1
            if layout.state:
                state[row] = one.state
            if layout.head == "diffusion":
                noise[row] = one.noise
            if layout.geometry:
                positions[row] = np.nan if one.positions is None else one.positions.reshape(-1, 3)
        step.inputs.load()
        step.run(words.tobytes())
        clock.end("infer")
        step.answer.store()
        runner.wait()
        clock.end("download")
        tokens, numbers = step.answer.arrays
        require_finite(numbers.ravel().tolist())
        stages = clock.milliseconds()
        discrete, numbers = layout.head == "none", numbers.astype(np.float64)
        return [
            Chunk(
                normalized=numbers[row],
                tokens=tokens[row].astype(np.int64) if discrete else None,
                margins=numbers[row].ravel() if discrete else np.empty(0),
                stages_ms=stages,
            )
            for row in range(len(asked))
        ]


def plain_inference(model: OFTModel, steps: int = 50) -> ChunkInference:
    """Return the reference path: plain torch, sequences without padding."""

    def encode(images: torch.Tensor, film: Sequence[torch.Tensor]) -> torch.Tensor:
        return model.embed_image(model.normalize(images), film)

    runner = make_runner(model.device, graphs=False)
    weights = as_loaded(model.language_model)
    return ChunkInference(model, weights, model.ops, encode, runner, steps, bucket_step=1)


def make_chunk_engine(
    model: OFTModel,
    weights: DecoderWeights | None = None,
    ops: Ops | None = None,
    encode: VisionEncoder | None = None,
    steps: int = 50,
    quantization: str = "none",
) -> ChunkInference:
    """Return an engine for ``model``, with fused kernels and one graph per padded length.

    Without ``weights``, the decoder of ``model`` is fused with ``quantization``. ``ops`` and ``encode`` default to
    those of the device.
    """
    if weights is None:
        weights = fuse(model.language_model, quantization)
    ops, encode = ops or make_ops(weights.device), encode or VisionEncoder(model)
    return ChunkInference(model, weights, ops, encode, make_runner(weights.device), steps)


def check_chunks(ours: Sequence[Chunk], theirs: Sequence[Chunk], dtype: torch.dtype) -> None:
    """Raise EngineMismatchError if the engine's chunks, ``ours``, differ from ``theirs`` by more than rounding."""
    bounds = TOLERANCES[dtype]
    for one, other in zip(ours, theirs, strict=True):
        if one.tokens is not None and other.tokens is not None:
            error = float(other.margins[one.tokens != other.tokens].max(initial=0.0))
            good = error <= bounds.near_tie
        else:
            error = relative_error(torch.from_numpy(one.normalized), torch.from_numpy(other.normalized))
            good = error <= bounds.vision
        if not good:
            raise EngineMismatchError(f"the engine's chunk differs from the reference path's by {error:.2g}")
