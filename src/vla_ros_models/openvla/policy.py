"""OpenVLA as a :class:`~vla_ros.policies.base.Policy`, and what OpenVLA-OFT shares with it."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.config.checkpoints import base_folder
from vla_ros.contract.components import Component, parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import DeviceLostError, VlaRosError
from vla_ros.policies.base import Progress
from vla_ros.types import ActionChunk, FloatArray, IntArray, Observation, UInt8Array
from vla_ros.vision.preprocess import Preprocessor
from vla_ros.vision.processors import LiberoResize, ResizeNaive
from vla_ros_models.adapters import read_merged
from vla_ros_models.checkpoint_files import Produce, StoredTensor, from_files
from vla_ros_models.engine.device_errors import NotFiniteError
from vla_ros_models.engine.device_ops import make_ops
from vla_ros_models.engine.drafts import DraftState
from vla_ros_models.engine.graph_engine import GraphEngine
from vla_ros_models.engine.kernel_check import checked
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.token_engine import EngineRequest, TokenEngine
from vla_ros_models.engine.weights import DecoderWeights
from vla_ros_models.memory import MemoryCheck
from vla_ros_models.network_policy import SELF_TEST_INSTRUCTION, Asked, Images, Placement, two_images
from vla_ros_models.normalization import LearnedStatistics
from vla_ros_models.openvla.architecture import read_architecture
from vla_ros_models.openvla.inference import (
    check_engine,
    check_resizing,
    choose_engine,
    fit_guard,
    infer_reference,
    make_engine,
)
from vla_ros_models.openvla.loading import (
    DECODER,
    OPENVLA_CHOICES,
    build_empty,
    build_shard,
    check_weights,
    fill_quantized,
    plan_memory,
)
from vla_ros_models.openvla.network import OpenVLAModel, VisionEncoder, checked_encoder
from vla_ros_models.openvla.options import CheckpointOptions, OpenVLAOptions
from vla_ros_models.openvla.processing import (
    QUANTILES,
    ActionBins,
    ActionStatistics,
    DatasetStatistics,
    choose,
    read_dataset_statistics,
    with_declared_gripper,
)
from vla_ros_models.openvla.prompt import PromptEncoder, PromptSession, load_prompt_encoder
from vla_ros_models.ranks import LeadingRank
from vla_ros_models.split_policy import SplitPolicy
from vla_ros_models.splitting import check_split
from vla_ros_models.training import Trainable
from vla_ros_models.weights import fill, parameter_shapes

logger = logging.getLogger(__name__)

LONG_PROMPT = 80
"""Tokens in a long prompt. Its graph is captured at load, and runs other prompts until theirs are captured."""

NATIVE_GRIPPER = "0..1"
"""The gripper convention of Open X-Embodiment and LIBERO: 0 closed, 1 open."""

E = TypeVar("E", bound=GraphEngine[Any, Any])
G = TypeVar("G", bound=GraphEngine[Any, Any] | None)


@dataclass(frozen=True)
class LoadedNetwork(Generic[G]):
    """A loaded checkpoint with OpenVLA's network."""

    model: OpenVLAModel  # the reference network
    prompt: PromptEncoder
    bins: ActionBins
    statistics: ActionStatistics  # of the actions
    engine: G  # None if ``model`` runs without


L = TypeVar("L", bound=LoadedNetwork[Any])
R = TypeVar("R")
S = TypeVar("S", bound=PromptSession)


class OpenVLANetworkPolicy(SplitPolicy[L, S, R]):
    """Base of the policies with OpenVLA's network: a Llama behind two vision encoders.

    L, S and R are the types of the loaded network, of a session, and of what the network answers.
    """

    title: ClassVar[str] = "OpenVLA"
    _options: CheckpointOptions
    _bounds, _margin = QUANTILES, 0.0  # of the statistics

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._declared = config.features.action

    def other_statistics(self, normalized: FloatArray) -> dict[str, FloatArray]:
        own = self.loaded.statistics
        return {
            key: statistics.unnormalize(normalized)
            for key, statistics in self._statistics().readable().items()
            if key != own.key and statistics.dimension == own.dimension
        }

    @property
    def _base(self) -> Path:
        """Folder of the network: of the adapter's base model, or the checkpoint's."""
        return base_folder(self.folder, self._options.base) or self.folder

    def _statistics(self, group: str = "action") -> DatasetStatistics:
        """Return each dataset's statistics from the checkpoint, else from its adapter's base model."""
        own = self.folder if (self.folder / "dataset_statistics.json").exists() else self._base
        return read_dataset_statistics(own, group, self._bounds, self._margin)

    def learned(self) -> LearnedStatistics:
        """Return the statistics with which the checkpoint normalises; needs no weights."""
        actions, state = self._chosen_statistics()
        kept = None if state is None else state.learned(self._bounds)
        return LearnedStatistics("openvla", kept, actions.learned(self._bounds), data_set=actions.key)

    def _chosen_statistics(self) -> tuple[ActionStatistics, ActionStatistics | None]:
        """Return those of the actions and of the state, None if there is no state."""
        return choose(self._statistics(), self._options.unnorm_key), None

    def _details(self) -> str:
        return f", un-normalised by '{self.loaded.statistics.key}'"

    def _check(self, model: OpenVLAModel, manifest: Mapping[str, StoredTensor]) -> None:
        """Compare the stored tensors with the network, and set :attr:`_memory`."""
        check_weights(model, manifest, self.folder)
        check_split(model.architecture.llm, self._options.gpus, self._options.quantization)

    def _plan(self, model: OpenVLAModel, device: torch.device) -> None:
        """Set :attr:`_memory` for the network, or the shard of it, that runs on ``device``."""
        plan = partial(plan_memory, parameter_shapes(model), model.architecture)
        self._memory = MemoryCheck(plan, OPENVLA_CHOICES, str(device))

    def _fill(
        self, model: OpenVLAModel, produce: Produce, where: Placement, progress: Progress
    ) -> DecoderWeights | None:
        kind, dtype = self._options.quantization, getattr(torch, where.dtype)
        if self._options.gpus > 1:
            self._ranks = self._ranks or self._lead(where)
        if kind != "none" or self._ranks is not None:
            return fill_quantized(model, produce, where.device, dtype, kind, progress, self._ranks)
        fill(model, produce, where.device, dtype, progress)
        return None

    def _kernels(
        self, model: OpenVLAModel, decoder: DecoderWeights | None, images: Sequence[UInt8Array], film: bool = False
    ) -> tuple[Ops | None, VisionEncoder | None]:
        """Return checked operations and a checked vision encoder; None stands for the default.

        Without a quantised ``decoder``, the operations are checked by comparison with the reference path.
        """
        if not self._options.self_test and self._ranks is None:
            return None, None
        strict = self._options.engine != "auto" or self._ranks is not None
        encode = None if film else checked_encoder(model, images, strict=strict, ranks=self._ranks)
        if decoder is None:
            return None, encode
        if self._ranks is None:
            return checked(make_ops(decoder.device), decoder, strict=strict), encode
        # Each rank checks its own products; all of them must run the same kernels, so nothing stands in for them.
        checked(make_ops(decoder.device, Ranks()), decoder, strict=strict)
        return make_ops(decoder.device, self._ranks), encode

    def _engine(
        self, model: OpenVLAModel, make: Callable[[], E], check: Callable[[E], None], has_fallback: bool
    ) -> E | None:
        """Make and check an engine; None for the reference path, to which ``auto`` falls back after a failure."""
        if choose_engine(self._options, model.device) == "reference":
            return None
        engine = None
        try:
            engine = make()
            if self._rank:
                engine.follow()
                raise SystemExit
            if isinstance(self._ranks, LeadingRank):
                self._ranks.wait()
            check(engine)
        except Exception as error:
            if engine is not None:
                engine.close()
            if self._options.engine != "auto" or not has_fallback or isinstance(error, DeviceLostError):
                raise
            logger.warning(
                "policy.engine: the engine failed, using the reference path, which is several times slower: %s. "
                "Set policy.engine:=reference to silence this warning",
                error,
            )
            return None
        return engine

    def _action(self, dimension: int, undeclared: str) -> tuple[Component, ...]:
        """Return the parts of an action of seven numbers, delta and gripper; else ``features.action`` names them.

        The gripper has the range that ``features.action`` declares, or the form ``undeclared``.
        """
        if dimension != PolicySpec.dimension:
            return ()
        declared = parse_components(" + ".join(self._declared), action=True) if self._declared else ()
        ranges = [part.form for part in declared if part.quantity == "gripper" and part.range is not None]
        return Component("arm", "tip_delta"), Component(
            "arm", "gripper", ranges[0] if len(ranges) == 1 else undeclared
        )

    def _chunk(
        self,
        observation: Observation,
        prompt: IntArray,
        normalized: FloatArray,
        tokens: IntArray | None,
        margins: FloatArray,
        stages: Mapping[str, float],
        **info: object,
    ) -> ActionChunk:
        """Un-normalise a chunk [K, D] for a prompt; ``tokens`` is None if actions are not tokens."""
        started, loaded = time.perf_counter(), self.loaded
        if tokens is not None:
            info |= {"logit_margins": tuple(map(float, margins)), "outside_bins": loaded.bins.outside(tokens)}
        actions = with_declared_gripper(loaded.statistics.unnormalize(normalized), self.spec)
        return ActionChunk(
            actions=actions,
            stamp=observation.stamp,
            normalized=normalized,
            tokens=tokens,
            stages_ms={**stages, "post": (time.perf_counter() - started) * 1e3},
            info={"prompt_tokens": len(prompt), **info},
        )


_CROPS = {"libero": 0.9, "bridge": 1.0}  # share of the area that OpenVLA's evaluation on a robot keeps

_Loaded = LoadedNetwork[TokenEngine | None]


@dataclass
class OpenVLASession(PromptSession):
    """One robot's encoded instruction, and the engine's draft from the last answer, on which no action depends."""

    draft: DraftState = field(default_factory=DraftState)

    def reset(self) -> None:
        self.draft = DraftState()


class OpenVLAPolicy(OpenVLANetworkPolicy[_Loaded, OpenVLASession, EngineRequest]):
    """Decodes one action greedily from one image and an instruction.

    A chunk's ``info`` has ``logit_margins`` (best minus second-best logit of each token) and ``outside_bins``
    (number of tokens that are not action tokens and are clipped).
    """

    Options = OpenVLAOptions
    _options: OpenVLAOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._camera, self._preset = config.camera, config.preset
        self._image_key = config.camera.keys[0]
        self.spec = PolicySpec((ImageFeature(self._image_key),), action=self._action(PolicySpec.dimension, ""))

    def start_session(self) -> OpenVLASession:
        return OpenVLASession()

    def _open(self, where: Placement) -> tuple[_Loaded, Produce]:
        options, base = self._options, self._base
        architecture = read_architecture(base)
        statistics = choose(self._statistics(), options.unnorm_key)
        prompt = load_prompt_encoder(base, architecture, options.prompt, statistics.dimension)
        whole = build_empty(architecture)
        manifest = self._viewed(read_merged(self.folder, options.base), parameter_shapes(whole))
        self._check(whole, manifest)
        model = build_shard(OpenVLAModel, architecture, self._shard)
        self._plan(model, where.device)
        bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
        produce = from_files(manifest, self._shard.cut(manifest, DECODER))
        return _Loaded(model, prompt, bins, statistics, None), produce

    def _build(self, opened: tuple[_Loaded, Produce], where: Placement, progress: Progress) -> None:
        self._loaded, produce = opened
        self.spec = self._spec(self._loaded)
        weights = self._fill(self._loaded.model, produce, where, progress)
        self._loaded = replace(self._loaded, engine=self._make_engine(self._loaded, weights))

    def _spec(self, loaded: _Loaded) -> PolicySpec:
        dimension, side = loaded.statistics.dimension, loaded.model.architecture.image_size
        return PolicySpec(
            (ImageFeature(self._image_key, self._resize((side, side), loaded.statistics.key)),),
            action=self._action(dimension, ""),
            dimension=dimension,
        )

    def trainable(self, where: Placement, recompute_layers: bool = True, **options: Any) -> Trainable:
        from vla_ros_models.openvla.training import make_trainable

        loaded, produce = self._open(where)
        fill(loaded.model, produce, where.device, getattr(torch, where.dtype))
        stored, keys = read_merged(self.folder, self._options.base), (self._image_key,)
        return make_trainable(loaded, self._spec(loaded), keys, stored, "openvla", recompute_layers)

    def _resize(self, size: tuple[int, int], dataset: str) -> ResizeNaive | LiberoResize:
        """Return the resize of OpenVLA's evaluation on ``dataset``, or else on the preset's robot.

        There, images pass JPEG and Lanczos-3, for LIBERO also a crop; elsewhere, the published processor resizes.
        """
        robot = next(
            (robot for name in (dataset, self._preset) for robot in _CROPS if name.startswith(robot)), None
        )
        if robot is None:
            return ResizeNaive(size)
        area = _CROPS[robot]
        logger.info("images: JPEG, Lanczos-3, %.3g of the area, as in OpenVLA's evaluation on %s", area, robot)
        return LiberoResize(size, area)

    def _make_engine(self, loaded: _Loaded, weights: DecoderWeights | None) -> TokenEngine | None:
        """Return an engine that passed its tests, or None; ``weights`` is the quantised decoder, or None."""
        options, model, count = self._options, loaded.model, loaded.statistics.dimension
        images = two_images(*self.spec.processors[self._image_key].size)
        prompt = loaded.prompt.encode(SELF_TEST_INSTRUCTION)

        def make() -> TokenEngine:
            ops, encode = self._kernels(model, weights, images)
            return make_engine(model, count, drafts=options.drafts, weights=weights, ops=ops, encode=encode)

        def check(engine: TokenEngine) -> None:
            engine.warm_up([len(prompt), LONG_PROMPT])
            camera = self._camera.each[self._camera.keys.index(self._image_key)]
            noise, _ = two_images(camera.height, camera.width)
            check_resizing(engine, Preprocessor(self._camera, self.spec).raw(noise))
            if options.self_test and weights is None:
                check_engine(model, engine, images, prompt, count)
            if options.self_test:
                fit_guard(engine, images, prompt)

        return self._engine(model, make, check, has_fallback=weights is None)

    def _warm_up(self, batch: int) -> bool:
        engine = self.loaded.engine
        if engine is not None:
            engine.warm_up([len(self.loaded.prompt.encode(SELF_TEST_INSTRUCTION)), LONG_PROMPT], batch)
        return engine is not None

    def _request(self, session: OpenVLASession, observation: Observation, images: Images) -> EngineRequest:
        is_new = session.instruction != observation.instruction
        tokens = session.encode(self.loaded.prompt, observation.instruction)
        if is_new:
            session.draft = DraftState()
        return EngineRequest(images[self._image_key], tokens, session.draft)

    def _answer(self, asked: Sequence[Asked[OpenVLASession, EngineRequest]]) -> Iterator[ActionChunk | VlaRosError]:
        engine = self.loaded.engine
        if engine is None:
            yield from map(self._by_reference, asked)
            return
        for one, answer in zip(asked, engine.answer([one.request for one in asked]), strict=True):
            one.session.draft = answer.draft
            yield self._chunk(
                one.observation,
                one.request.prompt,
                self.loaded.bins.decode(answer.tokens)[None],
                answer.tokens,
                answer.margins,
                answer.stages_ms,
                draft_accepted=answer.accepted,
                decoder_passes=answer.passes,
            )

    def _by_reference(self, asked: Asked[OpenVLASession, EngineRequest]) -> ActionChunk | VlaRosError:
        loaded, image = self.loaded, asked.request.image
        assert isinstance(image, np.ndarray), "the reference path takes no camera images"
        try:
            tokens, margins, stages = infer_reference(
                loaded.model, image, asked.request.prompt, loaded.statistics.dimension
            )
        except NotFiniteError as error:
            return error
        return self._chunk(
            asked.observation, asked.request.prompt, loaded.bins.decode(tokens)[None], tokens, margins, stages
        )
