"""OpenVLA's network: vision towers, projector, Llama decoder; and its vision encoder with the engine's kernels.

Parameter names are the checkpoint's keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_ros.types import UInt8Array
from vla_ros_models.engine import decoder
from vla_ros_models.engine.device_errors import EngineMismatchError, raise_explained
from vla_ros_models.engine.device_ops import make_tower_ops
from vla_ros_models.engine.kernel_check import agrees
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.tolerances import TOLERANCES, relative_error
from vla_ros_models.engine.tower_ops import TowerOps
from vla_ros_models.engine.weights import DecoderWeights, LlamaDecoder, as_loaded
from vla_ros_models.openvla.architecture import Architecture
from vla_ros_models.vision_tower import Mlp, VisionBackbone, VisionTower


class Projector(Mlp):
    """Maps patch features [B, patches, vision_width] to the language model's embedding space.

    As in the Prismatic models, it has three layers after two towers and two layers after one tower.
    """

    def __init__(self, vision_width: int, llm_width: int, fused: bool) -> None:
        super().__init__(vision_width, 4 * vision_width if fused else llm_width, llm_width)
        self.fc3 = nn.Linear(llm_width, llm_width) if fused else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = super().forward(tokens)
        return hidden if self.fc3 is None else self.fc3(functional.gelu(hidden))


class Answer(NamedTuple):
    """Greedy tokens with their logit margins."""

    tokens: Tensor  # int64 [B, D]
    margins: Tensor  # float32 [B, D], best minus second-best logit at each step


class Prefix(NamedTuple):
    """The keys and values of patches and prompts."""

    weights: DecoderWeights
    cache: KVCache
    end: Tensor  # next position, int32 [B]


class OpenVLAModel(nn.Module):
    """The whole network, in plain torch.

    The decoder is :mod:`vla_ros_models.engine.decoder` with torch's operations. With ``film``, a mean text
    embedding modulates the towers' blocks.
    """

    def __init__(self, architecture: Architecture, film: bool = False) -> None:
        super().__init__()
        llm = architecture.llm
        self.architecture = architecture
        self.vision_backbone = VisionBackbone(architecture.towers, llm.hidden_size if film else 0)
        self.projector = Projector(architecture.vision_width, llm.hidden_size, fused=len(architecture.towers) > 1)
        self.language_model = LlamaDecoder(llm)
        self.ops = Ops()

    @property
    def device(self) -> torch.device:
        return self.projector.fc1.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.projector.fc1.weight.dtype

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise uint8 [B, H, W, 3] RGB to pixels [B, 3 * towers, H, W] in the model's data type."""
        return self.vision_backbone.normalize(images).to(self.dtype)

    def embed_image(self, pixels: Tensor, film: Sequence[Tensor] = ()) -> Tensor:
        """Embed normalised pixels as patches [B, patches, llm_width]; ``film`` as for the vision backbone."""
        patches: Tensor = self.projector(self.vision_backbone(pixels, film))
        return patches

    def embed_sequence(self, patches: Tensor, input_ids: Tensor) -> Tensor:
        """Embed prompts, int64 [B, L], with patches [B, patches, llm_width] after BOS."""
        return decoder.embed_sequence(as_loaded(self.language_model), patches, input_ids)

    def prefill(self, patches: Tensor, input_ids: Tensor, room: int = 16) -> tuple[Tensor, Prefix]:
        """Run patches [B, patches, llm_width] and prompts of equal length, int64 [B, L].

        ``room`` positions stay free in the cache for :meth:`greedy`. Returns the logits [B, vocab_size] of the
        first action token, and the prefix.
        """
        weights, length = as_loaded(self.language_model), patches.shape[1] + input_ids.shape[1]
        cache = KVCache.allocate(weights, len(input_ids), length + room)
        end = torch.full((len(input_ids),), length, dtype=torch.int32, device=weights.device)
        logits = decoder.prefill(weights, self.ops, cache, patches, input_ids, end - 1, 1)
        return logits[:, 0], Prefix(weights, cache, end)

    def greedy(self, logits: Tensor, prefix: Prefix, count: int) -> Answer:
        """Decode ``count`` tokens greedily over the whole vocabulary, starting from :meth:`prefill`'s logits."""
        token, margin = self.ops.choose(logits[:, None])
        tokens, margins = decoder.decode(prefix.weights, self.ops, prefix.cache, token[:, 0], prefix.end, count - 1)
        return Answer(torch.cat([token, tokens], dim=1), torch.cat([margin, margins], dim=1))

    def hidden_states(self, sequence: Tensor) -> Tensor:
        """Return the last layer's hidden states of embeddings [B, S, llm_width], with gradients."""
        return decoder.hidden_states(as_loaded(self.language_model), self.ops, sequence)

    def forward(self, pixels: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run all positions at once, with gradients and no cache, for training and tests.

        Takes normalised pixels [B, 3 * towers, H, W] and tokens, int64 [B, L]: BOS, prompt, then any action tokens.
        Returns logits [B, L + patches, vocab_size], last hidden states [B, L + patches, llm_width] and patch
        embeddings [B, patches, llm_width]. Position ``patches + i`` predicts ``input_ids[:, i + 1]``.
        """
        patches = self.embed_image(pixels)
        hidden = self.hidden_states(self.embed_sequence(patches, input_ids))
        return self.language_model.lm_head(hidden).float(), hidden, patches


class VisionEncoder:
    """Encodes uint8 images [B, H, W, 3] as patch embeddings, with the two towers in parallel on a GPU.

    Equivalent to ``model.embed_image(model.normalize(images))``. One tower does not fill a large GPU, so the second
    runs on a separate stream, also within a captured graph. Of several ``ranks``, each runs its own towers, and
    then has the features of all.
    """

    @torch.no_grad()
    def __init__(self, model: OpenVLAModel, ops: TowerOps | None = None, ranks: Ranks | None = None) -> None:
        self.model = model
        self.ops = make_tower_ops(model.device) if ops is None else ops
        self.ranks = Ranks() if ranks is None else ranks
        towers, shapes = model.vision_backbone.towers, model.architecture.towers
        # The model's normalisation of each byte value, as a bit-identical look-up table.
        every = torch.arange(256, dtype=torch.uint8, device=model.device).view(1, 256, 1, 1).expand(-1, -1, -1, 3)
        tables = model.normalize(every).view(len(shapes), 3, 256)
        self._table = tables[list(model.vision_backbone.placed)].contiguous()
        self._prefixes = [tower.prefix() for tower in towers]
        patch = shapes[0].patch_size
        zeros = self.ops.patch_width(patch) - 3 * patch**2
        self._kernels = [functional.pad(tower.patch_embed.proj.weight.flatten(1), (0, zeros)) for tower in towers]
        # One per calling stream: the inference thread must not use a stream that is being captured.
        self._side_streams: dict[int, torch.cuda.Stream] = {}

    def __call__(self, images: Tensor, film: Sequence[Tensor] = ()) -> Tensor:
        """Return [B, patches, llm_width]; ``film`` holds each tower's modulations, or is empty."""
        embeddings: Tensor = self.model.projector(self._gathered(self.features(images, film)))
        return embeddings

    def _gathered(self, features: Tensor) -> Tensor:
        """Return the features of all towers from those of this rank's."""
        if self.ranks.count == 1:
            return features
        placed, parts = list(self.model.vision_backbone.placed), []
        for index, shape in enumerate(self.model.architecture.towers):
            if index in placed:
                widths = [self.model.architecture.towers[one].width for one in placed]
                parts.append(torch.split(features, widths, dim=-1)[placed.index(index)].contiguous())
            else:
                parts.append(features.new_empty(*features.shape[:2], shape.width))
            self.ranks.copy(parts[-1], index % self.ranks.count)
        return torch.cat(parts, dim=-1)

    def features(self, images: Tensor, film: Sequence[Tensor] = ()) -> Tensor:
        """Return the features of the towers on this device, [B, patches, sum of their widths]."""
        towers, shape = self.model.vision_backbone.towers, self.model.architecture.towers[0]
        widths = [tower.shape.width for tower in towers]
        features = self._table.new_empty(len(images), shape.patches, sum(widths))
        if not towers:
            return features
        patches = self.ops.patchify(images, self._table, shape.patch_size)  # [towers, B, patches, 588]
        parts = torch.split(features, widths, dim=-1)
        pairs: Sequence[Tensor | None] = film or [None] * len(towers)
        work = list(zip(towers, self._kernels, patches, self._prefixes, parts, pairs, strict=True))

        def run(tower: VisionTower, kernel: Tensor, pixels: Tensor, *rest: Any) -> None:
            tower.run(self.ops, functional.linear(pixels, kernel, tower.patch_embed.proj.bias), *rest)

        with self._side_stream(images.device) as side:
            with side:
                for one in work[1:]:
                    run(*one)
            run(*work[0])
        return features

    @contextmanager
    def _side_stream(self, device: torch.device) -> Iterator[AbstractContextManager[Any]]:
        """Open a side stream that starts after the current stream's work, and join it at the end.

        It is joined even after an error, because the allocator reuses both streams' memory on the current stream.
        """
        if device.type != "cuda" or len(self._prefixes) < 2:
            yield nullcontext()
            return
        main = torch.cuda.current_stream(device)
        side = self._side_streams.get(main.cuda_stream)
        if side is None:
            side = torch.cuda.Stream(device, priority=main.priority)  # type: ignore[no-untyped-call]
            self._side_streams[main.cuda_stream] = side
        side.wait_stream(main)
        try:
            yield torch.cuda.stream(side)
        finally:
            main.wait_stream(side)


def to_device(image: UInt8Array, device: torch.device) -> Tensor:
    """Copy an image to the device as uint8 [1, H, W, 3]."""
    # A copy takes microseconds; torch accepts neither negative strides nor read-only arrays.
    return torch.from_numpy(image.copy())[None].to(device)


@torch.inference_mode()
def check_vision(encoder: VisionEncoder, images: Sequence[UInt8Array]) -> None:
    """Raise EngineMismatchError if features differ from torch's by more than rounding."""
    model, whole = encoder.model, encoder.ranks.count == 1
    bound = TOLERANCES[model.dtype].vision
    if not model.vision_backbone.placed:
        return
    for image in images:
        batch = to_device(image, model.device)
        pixels = model.normalize(batch)
        if whole:
            error = relative_error(encoder(batch), model.embed_image(pixels))
        else:
            error = relative_error(encoder.features(batch), model.vision_backbone(pixels))
        if not error <= bound:  # also true for NaN
            raise EngineMismatchError(
                f"the engine's kernels for the vision towers differ from torch by {error:.2g}, at most {bound:.0e} "
                "expected"
            )


def checked_encoder(
    model: OpenVLAModel, images: Sequence[UInt8Array], *, strict: bool, ranks: Ranks | None = None
) -> VisionEncoder:
    """Return the vision encoder with fused kernels, or with plain torch if there are none or they fail.

    They must pass :func:`check_vision`. A failure is logged, or raised as EngineMismatchError with ``strict``.
    """
    encoder = VisionEncoder(model, ranks=ranks)
    if type(encoder.ops) is TowerOps:
        return encoder

    def check() -> None:
        try:
            check_vision(encoder, images)
        except RuntimeError as error:
            raise_explained(error, model.device)

    instead = "torch runs the vision towers instead of the engine's kernels"
    return encoder if agrees(check, instead, strict=strict) else VisionEncoder(model, TowerOps(), ranks)
