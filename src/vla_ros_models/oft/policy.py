"""OpenVLA-OFT as a :class:`~vla_ros.policies.base.Policy`."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.base import Progress
from vla_ros.policies.published import loop_of
from vla_ros.types import ActionChunk, Float32Array, Observation
from vla_ros.vision.points import camera_positions
from vla_ros_models.checkpoint_files import read_fields
from vla_ros_models.engine.weights import DecoderWeights
from vla_ros_models.geometry import GEOMETRY, read_geometry, require_images
from vla_ros_models.network_policy import SELF_TEST_INSTRUCTION, Asked, Images, Placement, two_images
from vla_ros_models.oft import OFTOptions, choose_variant
from vla_ros_models.oft.inference import (
    ChunkInference,
    ChunkRequest,
    check_chunks,
    make_chunk_engine,
    plain_inference,
)
from vla_ros_models.oft.loading import Weights, layout_of, read_weights
from vla_ros_models.oft.network import Layout, OFTModel
from vla_ros_models.oft.processing import OFTResize
from vla_ros_models.openvla.architecture import Architecture, read_architecture
from vla_ros_models.openvla.loading import DECODER, build_shard
from vla_ros_models.openvla.policy import LONG_PROMPT, NATIVE_GRIPPER, LoadedNetwork, OpenVLANetworkPolicy
from vla_ros_models.openvla.processing import ActionBins, ActionStatistics, choose
from vla_ros_models.openvla.prompt import PromptEncoder, PromptSession, load_prompt_encoder
from vla_ros_models.training import Trainable
from vla_ros_models.weights import empty, fill, parameter_shapes

logger = logging.getLogger(__name__)

STATE_KEY = "state"
MARGIN = 1e-8
"""Added to the width of every range, as in the published code."""


@dataclass(frozen=True)
class Description:
    """The contents of a checkpoint's files, before any weight is loaded."""

    architecture: Architecture
    layout: Layout
    weights: Weights
    statistics: ActionStatistics  # of the actions
    state: ActionStatistics | None  # None if there is no state
    spec: PolicySpec


@dataclass(frozen=True)
class _Loaded(LoadedNetwork[ChunkInference]):
    model: OFTModel
    state: ActionStatistics | None  # None if there is no state


@dataclass
class OFTSession(PromptSession):
    """One robot's encoded instruction and noise."""

    random: np.random.Generator = field(default_factory=np.random.default_rng)  # noise of a diffusion head


class OFTPolicy(OpenVLANetworkPolicy[_Loaded, OFTSession, ChunkRequest]):
    """Infers a chunk of actions from one to three images, an instruction and optionally a state.

    ``info`` of a discrete checkpoint's chunk has ``logit_margins`` and ``outside_bins``.
    """

    Options = OFTOptions
    title = "OpenVLA-OFT"
    _options: OFTOptions
    _margin = MARGIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._keys, self._features, self._preset = config.camera.keys, config.features, config.preset
        self.spec = PolicySpec(images=tuple(ImageFeature(key) for key in self._keys))

    def describe(self) -> PolicySpec:
        return self._describe(towers=False).spec

    def start_session(self) -> OFTSession:
        seed = self._options.seed
        return OFTSession(random=np.random.default_rng(None if seed < 0 else seed))

    def _chosen_statistics(self) -> tuple[ActionStatistics, ActionStatistics | None]:
        found = self._describe(towers=False)
        return found.statistics, found.state

    def _describe(self, *, towers: bool = True) -> Description:
        """Read the files; without ``towers``, the result has the spec, but cannot be loaded."""
        options, folder = self._options, self.folder
        variant = choose_variant(options, self._preset)
        config = read_fields(self._base / "config.json")
        geometry, pairs = read_geometry(config)
        keys = tuple(key for key in self._keys if key not in pairs.values())[: options.images or None]
        if len(keys) < options.images:
            raise ConfigError(
                f"policy.images: the checkpoint takes {options.images} images, found camera.keys {list(keys)}; "
                "add the missing cameras, in the order used in training"
            )
        architecture = read_architecture(self._base, {"of the geometric tokens": GEOMETRY})
        require_images(pairs, [str(number) for number in range(len(keys))], config.where)
        self._bounds = variant.bounds
        statistics = choose(self._statistics(), options.unnorm_key)
        dimension = statistics.dimension
        if variant.action not in (0, dimension):
            raise ConfigError(
                f"preset: {self._preset} has actions of {variant.action} numbers, but the checkpoint's statistics "
                f"for '{statistics.key}' have {dimension}; the checkpoint is for another robot"
            )
        weights = read_weights(folder, options.base, towers=towers)
        layout = layout_of(weights, architecture, folder, len(keys), variant.chunk, dimension)
        layout = replace(layout, geometry=geometry)
        state = choose(self._statistics("proprio"), statistics.key) if layout.state else None
        if state is not None and state.dimension != layout.state:
            raise CheckpointError(
                f"{folder}: proprio_projector takes {layout.state} numbers, but the statistics of '{state.key}' "
                f"have {state.dimension}; the files belong to different checkpoints"
            )
        size = (architecture.image_size, architecture.image_size)
        processor = OFTResize(size, options.crop_area, variant.camera_side)
        loop = loop_of("oft", self._preset)
        spec = PolicySpec(
            images=tuple(ImageFeature(key, processor) for key in keys),
            state=(StateFeature(self._state_key(), size=layout.state, middle=state.middle),) if state else (),
            action=self._action(dimension, NATIVE_GRIPPER),
            dimension=dimension,
            horizon=layout.chunk,
            rate_hz=loop.rate_hz,
            execute_steps=loop.execute_steps,
            noise=(layout.chunk, layout.action) if layout.head == "diffusion" else (),
            points=tuple((keys[int(number)], points) for number, points in pairs.items()),
        )
        return Description(architecture, layout, weights, statistics, state, spec)

    def _open(self, where: Placement) -> tuple[Description, OFTModel, PromptEncoder]:
        found = self._describe()
        architecture, layout = found.architecture, found.layout
        reserved = (layout.images - 1) * architecture.patches + layout.extras + layout.slots + 1
        prompt = load_prompt_encoder(self._base, architecture, "auto", reserved)
        if layout.film and self._options.gpus > 1:
            raise ConfigError(
                f"policy.gpus: {self._options.gpus}, but the text modulates the vision towers of this checkpoint "
                "(FiLM), which only one GPU can run; set policy.gpus to 1"
            )
        logger.info("%s %s: %s", self.title, self.folder.name, layout)
        whole = empty(lambda: OFTModel(architecture, layout))
        viewed = self._viewed(found.weights.manifest, parameter_shapes(whole))
        found = replace(found, weights=found.weights.changed(viewed))
        self._check(whole, viewed)
        model = build_shard(lambda part: OFTModel(part, layout), architecture, self._shard)
        self._plan(model, where.device)
        return found, model, prompt

    def _build(
        self, opened: tuple[Description, OFTModel, PromptEncoder], where: Placement, progress: Progress
    ) -> None:
        found, model, prompt = opened
        produce = found.weights.produce(self._shard.cut(found.weights.manifest, DECODER))
        decoder = self._fill(model, produce, where, progress)
        self.spec = found.spec
        plain = None if decoder is not None else plain_inference(model, self._options.denoising_steps)
        inference = self._make_engine(model, prompt, decoder, plain) or plain
        assert inference is not None, "quantised weights have no reference path, so a failed engine raises"
        bins = ActionBins(found.architecture.action_vocab_size, found.architecture.action_bins)
        self._loaded = _Loaded(model, prompt, bins, found.statistics, inference, found.state)

    def trainable(self, where: Placement, recompute_layers: bool = True, **options: Any) -> Trainable:
        from vla_ros_models.openvla.training import make_trainable

        found, model, prompt = self._open(where)
        if found.layout.head == "diffusion":
            raise ConfigError(f"{self.folder}: a diffusion head is not trained here; train the L1 or discrete form")
        produce = found.weights.produce()
        fill(model, produce, where.device, getattr(torch, where.dtype))
        bins = ActionBins(found.architecture.action_vocab_size, found.architecture.action_bins)
        loaded = LoadedNetwork(model, prompt, bins, found.statistics, None)
        keys = found.spec.image_keys
        stored, state = found.weights.manifest, found.state
        area = self._options.crop_area
        trainable = make_trainable(loaded, found.spec, keys, stored, "oft", recompute_layers, state, area)
        return replace(trainable, layout=found.layout.head, produce=produce)

    def _make_engine(
        self, model: OFTModel, prompt: PromptEncoder, decoder: DecoderWeights | None, plain: ChunkInference | None
    ) -> ChunkInference | None:
        """Return an engine that passed its tests, or None for ``plain``."""
        options, ids, size = self._options, prompt.encode(SELF_TEST_INSTRUCTION), model.architecture.image_size
        pair = two_images(size, size)

        def make() -> ChunkInference:
            ops, encode = self._kernels(model, decoder, pair, model.layout.film)
            return make_chunk_engine(model, decoder, ops, encode, options.denoising_steps)

        def check(engine: ChunkInference) -> None:
            engine.warm_up([len(ids), LONG_PROMPT])
            if options.self_test and plain is not None:
                state, noise = np.zeros(model.layout.state), np.zeros(1)
                asked = [ChunkRequest([image] * model.layout.images, ids, state, noise) for image in pair]
                ours, theirs = ([one.answer(each) for each in asked] for one in (engine, plain))
                check_chunks(ours, theirs, model.dtype)

        return self._engine(model, make, check, has_fallback=plain is not None)

    def _warm_up(self, batch: int) -> bool:
        loaded = self.loaded
        if loaded.engine.batches:
            loaded.engine.warm_up([len(loaded.prompt.encode(SELF_TEST_INSTRUCTION)), LONG_PROMPT], batch)
        return loaded.engine.batches

    def _resizing_device(self) -> torch.device | None:
        return super()._resizing_device() if self.loaded.engine.runner.graphs else None

    def _request(self, session: OFTSession, observation: Observation, images: Images) -> ChunkRequest:
        loaded = self.loaded
        tokens = session.encode(loaded.prompt, observation.instruction)
        state = None if loaded.state is None else loaded.state.normalize(self._state(observation))
        layout, noise = loaded.model.layout, None
        if layout.head == "diffusion":
            drawn = session.random.standard_normal((layout.chunk, layout.action))
            noise = drawn if observation.noise is None else observation.noise
        positions: Float32Array | None = None
        if self.spec.points:
            sizes = loaded.model.architecture.image_size, loaded.model.architecture.patches, self._options.crop_area
            positions = camera_positions(observation.points, self.spec.points, list(images), *sizes)
        return ChunkRequest(list(images.values()), tokens, state, noise, positions)

    def _answer(self, asked: Sequence[Asked[OFTSession, ChunkRequest]]) -> Iterator[ActionChunk]:
        chunks = self.loaded.engine.answer_all([one.request for one in asked])
        for one, chunk in zip(asked, chunks, strict=True):
            normalized = chunk.normalized
            if chunk.tokens is not None:
                normalized = self.loaded.bins.decode(chunk.tokens).reshape(normalized.shape)
            yield self._chunk(
                one.observation, one.request.prompt, normalized, chunk.tokens, chunk.margins, chunk.stages_ms
            )

    def _state_key(self) -> str:
        """Return the name of the only state vector in ``features.state``, or :data:`STATE_KEY`."""
        declared = [re.split(r"[\s=\[]", text.strip(), maxsplit=1)[0] for text in self._features.state]
        return declared[0] if len(declared) == 1 else STATE_KEY
