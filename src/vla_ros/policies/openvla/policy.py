"""OpenVLA as a :class:`~vla_ros.policies.base.Policy`, on the engine or on the reference path."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.engine.device_errors import NotFiniteError
from vla_ros.engine.drafts import DraftState
from vla_ros.engine.executor import Engine, EngineRequest
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Progress, options_of
from vla_ros.policies.checkpoint_files import Produce, from_files, read_manifest
from vla_ros.policies.network_policy import SELF_TEST_INSTRUCTION, Asked, Placement, two_images
from vla_ros.policies.openvla import lora, reference
from vla_ros.policies.openvla.actions import ActionBins
from vla_ros.policies.openvla.architecture import read_architecture
from vla_ros.policies.openvla.build_engine import check_engine, check_resizing, fit_guard, make_engine
from vla_ros.policies.openvla.loading import build_empty, check_weights
from vla_ros.policies.openvla.network_policy import (
    LONG_PROMPT,
    LoadedNetwork,
    OpenVLANetworkPolicy,
    PromptSession,
)
from vla_ros.policies.openvla.options import OpenVLAOptions
from vla_ros.policies.openvla.prompt import load_prompt_encoder
from vla_ros.types import ActionChunk, IntArray, Observation, RawImage, UInt8Array
from vla_ros.vision.preprocess import Preprocessor
from vla_ros.vision.processors import LiberoResize, ResizeNaive

logger = logging.getLogger(__name__)

_CROPS = {"libero": 0.9, "bridge": 1.0}  # share of the area that OpenVLA's evaluation on a robot keeps


@dataclass(frozen=True)
class _Loaded(LoadedNetwork):
    """A loaded checkpoint."""

    engine: Engine | None = None  # runs instead of ``model``; None on the reference path

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


@dataclass
class OpenVLASession(PromptSession):
    """State of one robot."""

    # The engine's draft from the last answer; actions do not depend on it.
    draft: DraftState = field(default_factory=DraftState)

    def reset(self) -> None:
        self.draft = DraftState()


class OpenVLAPolicy(OpenVLANetworkPolicy[_Loaded, OpenVLASession, EngineRequest]):
    """Decodes one action greedily from one image and an instruction.

    A chunk's ``info`` has ``logit_margins`` (best minus second-best logit of each token), ``outside_bins`` (number
    of tokens that are not action tokens and are clipped) and ``prompt_tokens``.
    """

    Options = OpenVLAOptions

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, OpenVLAOptions)
        super().__init__(config, self._options)
        self._camera, self._preset = config.camera, config.preset
        self._image_key = config.camera.keys[0]
        self.spec = PolicySpec((ImageFeature(self._image_key),), action=self._action(PolicySpec.dimension, ""))

    def start_session(self) -> OpenVLASession:
        return OpenVLASession()

    def _open(self, where: Placement) -> tuple[_Loaded, Produce]:
        options, folder, base = self._options, self.folder, self._base
        architecture = read_architecture(base)
        statistics = self._chosen(options.unnorm_key)
        prompt = load_prompt_encoder(base, architecture, options.prompt, statistics.dimension)
        quantization = "none" if self._runs_engine(where) else options.quantization
        model = build_empty(architecture, quantization)
        manifest = read_manifest(base)
        check_weights(model, manifest, folder)
        produce = from_files(manifest)
        if options.base:
            produce = lora.merging(produce, lora.read_adapter(lora.adapter_folder(folder), manifest))
            logger.info("policy.base: the LoRA weights of %s are merged into %s", folder.name, base.name)
        self._set_memory(model, where.device)
        bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
        return _Loaded(model, prompt, bins, statistics), produce

    def _build(self, opened: tuple[_Loaded, Produce], where: Placement, progress: Progress) -> None:
        self._loaded, produce = opened
        model, dimension = self._loaded.model, self._loaded.statistics.dimension
        size = (model.architecture.image_size, model.architecture.image_size)
        self.spec = PolicySpec(
            (ImageFeature(self._image_key, self._resize(size, self._loaded.statistics.key)),),
            action=self._action(dimension, ""),
            dimension=dimension,
        )
        weights = self._fill(model, produce, where, progress)
        if self._runs_engine(where):
            self._loaded = replace(self._loaded, engine=self._make_engine(self._loaded, weights))

    def _resize(self, size: tuple[int, int], dataset: str) -> ResizeNaive | LiberoResize:
        """Return the resize of OpenVLA's evaluation on ``dataset``, or else on the preset's robot.

        On LIBERO and Bridge, images pass through JPEG and Lanczos-3; LIBERO's fine-tuned checkpoints also take a
        crop. Elsewhere, the published processor resizes.
        """
        robot = next(
            (robot for name in (dataset, self._preset) for robot in _CROPS if name.startswith(robot)), None
        )
        if robot is None:
            return ResizeNaive(size)
        area = _CROPS[robot]
        logger.info("images: JPEG, Lanczos-3, %.3g of the area, as in OpenVLA's evaluation on %s", area, robot)
        return LiberoResize(size, area)

    def _make_engine(self, loaded: _Loaded, weights: DecoderWeights | None) -> Engine | None:
        """Return an engine that passed its tests, or None if ``auto`` falls back.

        ``weights`` is the quantised decoder, which only the engine can run, or None.
        """
        options, model, count = self._options, loaded.model, loaded.statistics.dimension
        images, prompt = two_images(*self.spec.processors[self._image_key].size), self._prompt(loaded)

        def make() -> Engine:
            ops, encode = self._kernels(model, weights, images)
            return make_engine(model, count, drafts=options.drafts, weights=weights, ops=ops, encode=encode)

        def check(engine: Engine) -> None:
            engine.warm_up([len(prompt), LONG_PROMPT])
            camera = self._camera.each[self._camera.keys.index(self._image_key)]
            noise, _ = two_images(camera.height, camera.width)
            check_resizing(engine, Preprocessor(self._camera, self.spec).raw(noise))
            if options.self_test and weights is None:
                check_engine(model, engine, images, prompt, count)
            if options.self_test:
                fit_guard(engine, images, prompt)

        return self._engine(make, check, has_fallback=weights is None)

    def _prompt(self, loaded: _Loaded) -> IntArray:
        return loaded.prompt.encode(SELF_TEST_INSTRUCTION)

    def _warm_up(self, batch: int) -> bool:
        engine = self.loaded.engine
        if engine is not None:
            engine.warm_up([len(self._prompt(self.loaded)), LONG_PROMPT], batch)
        return engine is not None

    def _resizing_device(self) -> torch.device | None:
        return None if self.loaded.engine is None else self.loaded.engine.weights.device

    def _request(
        self, session: OpenVLASession, observation: Observation, images: Mapping[str, UInt8Array | RawImage]
    ) -> EngineRequest:
        is_new = session.instruction != observation.instruction
        tokens = session.encode(self.loaded.prompt, observation.instruction)
        if is_new:
            session.draft = DraftState()
        return EngineRequest(images[self._image_key], tokens, session.draft)

    @torch.inference_mode()
    def _answer(self, asked: Sequence[Asked[OpenVLASession, EngineRequest]]) -> list[ActionChunk | VlaRosError]:
        return list(self._by_engine(asked) if self.loaded.engine else map(self._by_reference, asked))

    def _by_engine(
        self, asked: Sequence[Asked[OpenVLASession, EngineRequest]]
    ) -> Iterator[ActionChunk | VlaRosError]:
        assert self.loaded.engine is not None
        for one, answer in zip(asked, self.loaded.engine.answer([one.request for one in asked]), strict=True):
            one.session.draft = answer.draft
            yield self._chunk(
                one,
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
            tokens, margins, stages = reference.answer(
                loaded.model, image, asked.request.prompt, loaded.statistics.dimension
            )
        except NotFiniteError as error:
            return error
        return self._chunk(asked, loaded.bins.decode(tokens)[None], tokens, margins, stages)
