"""OpenVLA-OFT behind the package's :class:`~vla_ros.policies.base.Policy`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.engine.device_ops import make_ops
from vla_ros.engine.kernel_check import checked
from vla_ros.engine.resizer import resizes
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import CheckpointError, ConfigError, DeviceLostError, ImageError, VlaRosError
from vla_ros.policies.base import Progress, Session, no_progress, options_of
from vla_ros.policies.checkpoint_files import checkpoint_folder
from vla_ros.policies.devices import explain_out_of_memory
from vla_ros.policies.oft.build import (
    check_chunks,
    check_vision,
    make_chunk_engine,
    normalize_state,
    plain_inference,
)
from vla_ros.policies.oft.checkpoint import Weights, layout_of, read_weights
from vla_ros.policies.oft.inference import Asked, Chunk, ChunkInference
from vla_ros.policies.oft.network import Layout, OFTModel
from vla_ros.policies.oft.options import OFTOptions
from vla_ros.policies.oft.processors import OFTResize
from vla_ros.policies.oft.variant import BOUNDS, Variant
from vla_ros.policies.openvla.actions import ActionBins, ActionStatistics, choose, read_statistics
from vla_ros.policies.openvla.architecture import Architecture, read_architecture
from vla_ros.policies.openvla.loading import check_weights, empty
from vla_ros.policies.openvla.network_policy import (
    LONG_PROMPT,
    NATIVE_GRIPPER,
    SELF_TEST_INSTRUCTION,
    LoadedNetwork,
    NetworkPolicy,
    Placement,
)
from vla_ros.policies.openvla.prompt import PromptEncoder, load_prompt_encoder
from vla_ros.policies.openvla.self_test import two_images
from vla_ros.policies.openvla.vision_encoder import VisionEncoder, checked_encoder
from vla_ros.types import ActionChunk, FloatArray, IntArray, Observation, RawImage, UInt8Array

logger = logging.getLogger(__name__)

STATE = "state"
MARGIN = 1e-8
"""Added to the width of every range, as in the published code."""


@dataclass(frozen=True)
class Description:
    """What the files state, before any weight is loaded."""

    folder: Path  # the checkpoint
    base: Path  # where its shards are: the same, or the base model's
    architecture: Architecture  # sizes of the network
    layout: Layout  # its variant
    weights: Weights  # its tensors, unread
    statistics: ActionStatistics  # of the actions
    state: ActionStatistics | None  # of the state; None where it takes none
    spec: PolicySpec  # inputs and outputs


@dataclass(frozen=True)
class Loaded(LoadedNetwork):
    """A loaded checkpoint."""

    model: OFTModel
    state: ActionStatistics | None  # normalises the state; None where it takes none
    inference: ChunkInference  # runs the network

    def close(self) -> None:
        """See :class:`~vla_ros.policies.openvla.network_policy.LoadedNetwork`."""
        self.inference.close()


@dataclass
class OFTSession(Session):
    """One robot's encoded instruction and noise."""

    random: np.random.Generator  # draws the noise that a diffusion head starts from
    instruction: str = ""
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


class OFTPolicy(NetworkPolicy[Loaded]):
    """Infers a chunk of actions from one to three images, an instruction and optionally a state."""

    Options = OFTOptions
    title = "OpenVLA-OFT"

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, OFTOptions)
        super().__init__(config, self._options)
        self._keys, self._features, self._preset = config.camera.keys, config.features, config.preset
        self._bounds = BOUNDS["q99"]
        self.spec = PolicySpec(images=tuple(ImageFeature(key) for key in self._keys))

    def describe(self) -> PolicySpec:
        """See :class:`~vla_ros.policies.base.Policy`."""
        return self._describe(towers=False).spec

    def _describe(self, *, towers: bool = True) -> Description:
        """Read the files; without ``towers`` nothing is merged, and no weights can be loaded."""
        options = self._options
        folder = checkpoint_folder(options.checkpoint)
        base = checkpoint_folder(options.base) if options.base else folder
        variant = Variant.of(options, self._preset, self._keys)
        architecture = read_architecture(base)
        own = folder if (folder / "dataset_statistics.json").exists() else base
        self._bounds = variant.bounds
        statistics = choose(self._statistics(own), options.unnorm_key)
        dimension = statistics.dimension
        variant.check(statistics.key, dimension)
        weights = read_weights(folder, base if options.base else None, towers=towers)
        layout = layout_of(weights, architecture, folder, len(variant.keys), variant.chunk, dimension)
        state = choose(self._statistics(own, "proprio"), statistics.key) if layout.state else None
        if state is not None and state.dimension != layout.state:
            raise CheckpointError(
                f"{folder}: proprio_projector takes {layout.state} numbers, the statistics of '{state.key}' have "
                f"{state.dimension}; the files belong to different checkpoints"
            )
        size = (architecture.image_size, architecture.image_size)
        processor = OFTResize(size, options.crop_area, variant.camera_side)
        spec = PolicySpec(
            images=tuple(ImageFeature(key, processor) for key in variant.keys),
            state=(StateFeature(self._state_key(), size=layout.state),) if layout.state else (),
            action=self._action(dimension, NATIVE_GRIPPER),
            dimension=dimension,
            horizon=layout.chunk,
            noise=(layout.chunk, layout.action) if layout.head == "diffusion" else (),
        )
        return Description(folder, base, architecture, layout, weights, statistics, state, spec)

    def load(self, progress: Progress = no_progress) -> None:
        """Read the checkpoint, check that its parts fit and that memory suffices, test and warm up."""
        self.close()
        options = self._options
        found = self._describe()
        architecture, layout = found.architecture, found.layout
        where = Placement.choose(options)
        reserved = (layout.images - 1) * architecture.patches + layout.extras + layout.slots + 1
        prompt = load_prompt_encoder(found.base, architecture, "auto", reserved)
        quantization = "none" if where.fast else options.quantization
        model = empty(lambda: OFTModel(architecture, layout, options.attention), quantization)
        check_weights(model, found.weights.manifest, found.folder)
        logger.info("%s %s: %s", self.title, found.folder.name, layout)
        with self._filled(model, found.weights.produce, found.folder, where, progress) as (decoder, advice):
            self.spec = found.spec
            inference = self._start(model, prompt, where.fast, decoder)
            bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
            self._loaded = Loaded(model, prompt, bins, found.statistics, advice, found.state, inference)
        key = found.statistics.key
        progress(
            1.0, f"{self.title} {found.folder.name} on {where.device} in {where.dtype}, un-normalised by '{key}'"
        )

    def start_session(self) -> OFTSession:
        """Start a session with no instruction and fresh noise."""
        return OFTSession(np.random.default_rng(None if self._options.seed < 0 else self._options.seed))

    def infer(self, session: OFTSession, observation: Observation) -> ActionChunk:
        """Infer a chunk from one observation.

        ``info`` of a discrete checkpoint has ``logit_margins`` and ``outside_bins``.
        """
        [answer] = self.infer_batch([(session, observation)])
        if isinstance(answer, VlaRosError):
            raise answer
        return answer

    def infer_batch(self, requests: Sequence[tuple[OFTSession, Observation]]) -> list[ActionChunk | VlaRosError]:
        """Infer for several robots: in one pass of the engine, or in turn with FiLM and on the reference path."""
        loaded = self.loaded
        began = time.perf_counter()
        answers: list[ActionChunk | VlaRosError | Asked] = [self._asked(loaded, *one) for one in requests]
        prepared = time.perf_counter()
        for raw in (False, True):  # images of a batch are all processed, or all as the cameras sent them
            rows = [i for i, one in enumerate(answers) if isinstance(one, Asked) and _is_raw(one) == raw]
            asked = [one for i in rows if isinstance(one := answers[i], Asked)]
            with explain_out_of_memory(str(loaded.model.device), loaded.advice):
                chunks = loaded.inference.answer_all(asked) if asked else []
            for row, one, chunk in zip(rows, asked, chunks, strict=True):
                answers[row] = self._chunk(loaded, one, chunk, requests[row][1].stamp, 1e3 * (prepared - began))
        return [one for one in answers if not isinstance(one, Asked)]

    def prepare(self, batch: int) -> bool:
        """Capture graphs for the usual and long prompts, where several robots share a pass."""
        loaded = self.loaded
        if not loaded.inference.batches:
            return False
        with explain_out_of_memory(str(loaded.model.device), loaded.advice):
            loaded.inference.warm_up([len(loaded.prompt.encode(SELF_TEST_INSTRUCTION)), LONG_PROMPT], batch)
        return True

    def _asked(self, loaded: Loaded, session: OFTSession, observation: Observation) -> Asked | VlaRosError:
        try:
            if session.instruction != observation.instruction or not session.tokens.size:
                session.tokens = loaded.prompt.encode(observation.instruction)
                session.instruction = observation.instruction
            images, state = self._images(observation), self._state(loaded, observation)
        except VlaRosError as error:
            return error
        layout, noise = loaded.model.layout, None
        if layout.head == "diffusion":
            drawn = session.random.standard_normal((layout.chunk, layout.action))
            noise = drawn if observation.noise is None else observation.noise
        return Asked(images, session.tokens, state, noise)

    def _chunk(self, loaded: Loaded, asked: Asked, chunk: Chunk, stamp: int, preprocess: float) -> ActionChunk:
        answered = time.perf_counter()
        normalized, info = _numbers(loaded, chunk)
        actions = self._with_declared_gripper(loaded.statistics.unnormalize(normalized))
        post = 1e3 * (time.perf_counter() - answered)
        return ActionChunk(
            actions=actions,
            stamp=stamp,
            normalized=normalized,
            tokens=chunk.tokens,
            stages_ms={"preprocess": preprocess, **chunk.stages_ms, "post": post},
            info={"prompt_tokens": len(asked.prompt), **info},
        )

    def _statistics(self, folder: Path, group: str = "action") -> Mapping[str, ActionStatistics]:
        return read_statistics(folder, group, self._bounds, MARGIN)

    def _state_key(self) -> str:
        """Return the name of the only state vector that ``features.state`` declares, else :data:`STATE`."""
        declared = [re.split(r"[\s=\[]", text.strip(), maxsplit=1)[0] for text in self._features.state]
        return declared[0] if len(declared) == 1 else STATE

    def _images(self, observation: Observation) -> list[UInt8Array] | list[RawImage]:
        """The images in the spec's order, as the cameras sent them where the engine's device processes them."""
        keys = self.spec.image_keys
        raw = [observation.raw_images[key] for key in keys if key in observation.raw_images]
        inference = self.loaded.inference
        device = inference.weights.device
        if inference.runner.graphs and len(raw) == len(keys) and all(resizes(device, image) for image in raw):
            return raw
        missing = [key for key in keys if key not in observation.images]
        if missing:
            raise ImageError(f"OpenVLA-OFT: no image {missing}, there are {list(observation.images)}")
        images = [observation.images[key] for key in keys]
        for key, image in zip(keys, images, strict=True):
            expected = (*self.spec.processors[key].size, 3)
            if image.dtype != np.uint8 or image.shape != expected:
                raise ImageError(
                    f"OpenVLA-OFT: image '{key}' is {image.dtype} {list(image.shape)}, expected uint8 "
                    f"{list(expected)}"
                )
        return images

    def _state(self, loaded: Loaded, observation: Observation) -> FloatArray | None:
        """Return the state in [-1, 1]."""
        if loaded.state is None:
            return None
        raw = observation.state.get(self._state_key())
        if raw is None or raw.shape != (loaded.state.dimension,):
            raise ConfigError(
                f"OpenVLA-OFT: the state has {'no' if raw is None else list(raw.shape)} numbers, expected "
                f"{loaded.state.dimension}; bind them with features.state"
            )
        return normalize_state(loaded.state, raw)

    def _start(
        self, model: OFTModel, prompt: PromptEncoder, fast: bool, decoder: DecoderWeights | None
    ) -> ChunkInference:
        """Return the engine's inference if it passes its tests, otherwise plain torch's."""
        options, ids = self._options, prompt.encode(SELF_TEST_INSTRUCTION)
        size = model.architecture.image_size
        pair = two_images(size, size)
        asked = [
            Asked([image] * model.layout.images, ids, np.zeros(model.layout.state), np.zeros(1)) for image in pair
        ]
        plain = None if decoder is not None else plain_inference(model, options.denoising_steps)
        if plain is not None and options.self_test:
            check_vision(*(plain.answer(one) for one in asked))
        if not fast:
            assert plain is not None
            return plain
        strict, engine = options.engine != "auto", None
        try:
            encode, ops = VisionEncoder(model), None
            if options.self_test and not model.layout.film:
                encode = checked_encoder(model, pair, strict=strict)
            if options.self_test and decoder is not None:
                ops = checked(make_ops(decoder.device), decoder, strict=strict)
            engine = make_chunk_engine(model, decoder, ops, encode, options.denoising_steps)
            engine.warm_up([len(ids), LONG_PROMPT])
            answers = [engine.answer(one) for one in asked]
            if options.self_test and plain is not None:
                check_chunks(answers, [plain.answer(one) for one in asked], model.dtype)
        except Exception as error:
            if engine is not None:
                engine.close()
            if strict or plain is None or isinstance(error, DeviceLostError):
                raise
            logger.warning("policy.engine: no engine, using the reference path, which is slower: %s", error)
            return plain
        if options.self_test:
            check_vision(*answers)
        return engine


def _is_raw(asked: Asked) -> bool:
    return isinstance(asked.images[0], RawImage)


def _numbers(loaded: Loaded, chunk: Chunk) -> tuple[FloatArray, dict[str, object]]:
    """Return the normalised actions [K, D] and further information about them."""
    if chunk.tokens is None:
        return chunk.normalized, {}
    normalized = loaded.bins.decode(chunk.tokens).reshape(chunk.normalized.shape)
    margins = tuple(float(margin) for margin in chunk.margins)
    return normalized, {"logit_margins": margins, "outside_bins": loaded.bins.outside(chunk.tokens)}
