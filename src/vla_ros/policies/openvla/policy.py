"""OpenVLA as a :class:`~vla_ros.policies.base.Policy`, on the engine or on the reference path."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.engine.device_ops import make_ops
from vla_ros.engine.drafts import DraftState
from vla_ros.engine.executor import Engine, Request
from vla_ros.engine.kernel_check import checked
from vla_ros.engine.resizer import resizes
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import DeviceLostError, ImageError, VlaRosError
from vla_ros.policies.base import Progress, Session, no_progress, options_of
from vla_ros.policies.checkpoint_files import checkpoint_folder, read_manifest
from vla_ros.policies.devices import explain_out_of_memory
from vla_ros.policies.openvla import lora, reference, self_test
from vla_ros.policies.openvla.actions import ActionBins, choose
from vla_ros.policies.openvla.architecture import read_architecture
from vla_ros.policies.openvla.build_engine import make_engine
from vla_ros.policies.openvla.loading import build_empty, check_weights, from_files
from vla_ros.policies.openvla.network_policy import (
    LONG_PROMPT,
    SELF_TEST_INSTRUCTION,
    LoadedNetwork,
    NetworkPolicy,
    Placement,
)
from vla_ros.policies.openvla.options import OpenVLAOptions
from vla_ros.policies.openvla.prompt import load_prompt_encoder
from vla_ros.policies.openvla.vision_encoder import checked_encoder
from vla_ros.types import ActionChunk, FloatArray, IntArray, Observation, RawImage, UInt8Array
from vla_ros.vision.preprocess import Preprocessor
from vla_ros.vision.processors import ResizeNaive

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded(LoadedNetwork):
    """A loaded checkpoint."""

    engine: Engine | None = None  # runs instead of ``model``; None on the reference path

    def close(self) -> None:
        """See :class:`~vla_ros.policies.openvla.network_policy.LoadedNetwork`."""
        if self.engine is not None:
            self.engine.close()


@dataclass
class OpenVLASession(Session):
    """State of one robot."""

    instruction: str = ""  # the encoded instruction
    tokens: IntArray | None = None  # int64 [L], its prompt on the host
    # The engine's draft from the last answer; actions do not depend on it.
    draft: DraftState = field(default_factory=DraftState)

    def reset(self) -> None:
        """Forget the previous tokens."""
        self.draft = DraftState()


@dataclass(frozen=True, eq=False)
class _Asked:
    """One request as network input: prompt [L], and the processed or the camera's image."""

    session: OpenVLASession
    tokens: IntArray
    image: UInt8Array | RawImage
    stamp: int


class OpenVLAPolicy(NetworkPolicy[Loaded]):
    """Decodes one action greedily from one image and an instruction."""

    Options = OpenVLAOptions

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, OpenVLAOptions)
        super().__init__(config, self._options)
        self._camera = config.camera
        self._image_key = config.camera.keys[0]
        self.spec = PolicySpec((ImageFeature(self._image_key),), action=self._action(PolicySpec.dimension, ""))

    def load(self, progress: Progress = no_progress) -> None:
        """Read the checkpoint, check that memory suffices and that the model sees, warm up."""
        self.close()
        options = self._options
        folder = checkpoint_folder(options.checkpoint)
        base = checkpoint_folder(options.base) if options.base else folder
        where = Placement.choose(options)
        architecture = read_architecture(base)
        own = folder if (folder / "dataset_statistics.json").exists() else base
        statistics = choose(self._statistics(own), options.unnorm_key)
        prompt = load_prompt_encoder(base, architecture, options.prompt, statistics.dimension)
        model = build_empty(architecture, options.attention, "none" if where.fast else options.quantization)
        manifest = read_manifest(base)
        check_weights(model, manifest, folder)
        produce = from_files(manifest)
        if base is not folder:
            produce = lora.merging(produce, lora.read_adapter(lora.adapter_folder(folder), manifest))
            logger.info("policy.base: the LoRA weights of %s are merged into %s", folder.name, base.name)
        with self._filled(model, produce, folder, where, progress) as (weights, advice):
            bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
            self._loaded = Loaded(model, prompt, bins, statistics, advice)
            size = (architecture.image_size, architecture.image_size)
            self.spec = PolicySpec(
                (ImageFeature(self._image_key, ResizeNaive(size)),),
                action=self._action(statistics.dimension, ""),
                dimension=statistics.dimension,
            )
            try:
                self._warm_up(folder, where.fast, weights)
            except BaseException:
                self.close()
                raise
        progress(
            1.0,
            f"{self.title} {folder.name} on {where.device} in {where.dtype}, un-normalised by '{statistics.key}'",
        )

    def start_session(self) -> OpenVLASession:
        """Start a session with no instruction and no previous tokens."""
        return OpenVLASession()

    def infer(self, session: OpenVLASession, observation: Observation) -> ActionChunk:
        """Infer from one observation: uint8 RGB of the processor's size under the key of ``spec.image_keys``.

        The engine uses ``raw_images`` instead if it can resize them with bit-identical results. ``info`` has
        ``logit_margins`` (best minus second-best logit of each token), ``outside_bins`` (tokens that were no action
        tokens and got clipped) and ``prompt_tokens``.
        """
        return _only(self.infer_batch([(session, observation)]))

    def infer_batch(
        self, requests: Sequence[tuple[OpenVLASession, Observation]]
    ) -> list[ActionChunk | VlaRosError]:
        """Infer for several robots: in one pass of the engine, or one by one on the reference path."""
        loaded = self.loaded
        frames = loaded.engine is not None and all(self._takes_frame(observation) for _, observation in requests)
        asked = [self._asked(loaded, *request, frames) for request in requests]
        good = [one for one in asked if isinstance(one, _Asked)]
        with explain_out_of_memory(str(loaded.model.device), loaded.advice):
            chunks = iter(self._answer(loaded, good) if good else ())
        return [next(chunks) if isinstance(one, _Asked) else one for one in asked]

    def prepare(self, batch: int) -> bool:
        """Capture graphs for the usual and long prompts; the reference path infers one by one."""
        loaded = self.loaded
        if loaded.engine is None:
            return False
        with explain_out_of_memory(str(loaded.model.device), loaded.advice):
            loaded.engine.warm_up([len(loaded.prompt.encode(SELF_TEST_INSTRUCTION)), LONG_PROMPT], batch)
        return True

    def _takes_frame(self, observation: Observation) -> bool:
        """Return True if the engine can process the camera's image with bit-identical results."""
        raw = observation.raw_images.get(self._image_key)
        engine = self.loaded.engine
        return engine is not None and raw is not None and resizes(engine.weights.device, raw)

    def _asked(
        self, loaded: Loaded, session: OpenVLASession, observation: Observation, frame: bool
    ) -> _Asked | VlaRosError:
        try:
            if session.tokens is None or session.instruction != observation.instruction:
                session.tokens = loaded.prompt.encode(observation.instruction)
                session.instruction, session.draft = observation.instruction, DraftState()
            image = observation.raw_images[self._image_key] if frame else self._image(observation)
        except VlaRosError as error:  # an invalid request must not affect the others
            return error
        return _Asked(session, session.tokens, image, observation.stamp)

    @torch.inference_mode()
    def _answer(self, loaded: Loaded, asked: Sequence[_Asked]) -> list[ActionChunk | VlaRosError]:
        if loaded.engine is None:
            return [self._answer_plainly(loaded, one) for one in asked]
        requests = [Request(one.image, one.tokens, one.session.draft) for one in asked]
        chunks: list[ActionChunk | VlaRosError] = []
        for one, answer in zip(asked, loaded.engine.answer(requests), strict=True):
            one.session.draft = answer.draft
            info = {"draft_accepted": answer.accepted, "decoder_passes": answer.passes}
            chunks.append(self._chunk(loaded, one, answer.tokens, answer.margins, answer.stages_ms, info))
        return chunks

    def _answer_plainly(self, loaded: Loaded, asked: _Asked) -> ActionChunk | VlaRosError:
        assert isinstance(asked.image, np.ndarray), "frames are the engine's"
        ids = torch.from_numpy(asked.tokens)[None].to(loaded.model.device)
        found = reference.answer(loaded.model, asked.image, ids, loaded.statistics.dimension)
        return self._chunk(loaded, asked, *found, {})

    def _chunk(
        self,
        loaded: Loaded,
        asked: _Asked,
        tokens: IntArray,
        margins: FloatArray,
        stages: Mapping[str, float],
        info: Mapping[str, object],
    ) -> ActionChunk | VlaRosError:
        started = time.perf_counter()
        if not np.isfinite(margins).all():
            return VlaRosError("OpenVLA: the network's logits are not numbers (NaN or Inf); the frame is dropped")
        normalized = loaded.bins.decode(tokens)
        actions = loaded.statistics.unnormalize(normalized)
        return ActionChunk(
            actions=self._with_declared_gripper(actions[None]),
            stamp=asked.stamp,
            normalized=normalized[None],
            tokens=tokens,
            stages_ms={**stages, "post": (time.perf_counter() - started) * 1e3},
            info={
                "logit_margins": tuple(float(margin) for margin in margins),
                "outside_bins": loaded.bins.outside(tokens),
                "prompt_tokens": len(asked.tokens),
                **info,
            },
        )

    def _image(self, observation: Observation) -> UInt8Array:
        image = observation.images.get(self._image_key)
        if image is None:
            raise ImageError(f"OpenVLA: no image '{self._image_key}', there are {list(observation.images)}")
        expected = (*self.spec.processors[self._image_key].size, 3)
        if image.dtype != np.uint8 or image.shape != expected:
            raise ImageError(
                f"OpenVLA: image '{self._image_key}' is {image.dtype} {list(image.shape)}, "
                f"expected uint8 {list(expected)}"
            )
        return image

    def _warm_up(self, folder: Path, fast: bool, weights: DecoderWeights | None) -> None:
        """Run the self-test and one whole inference, so that the first frame is not slow."""
        images = self_test.two_images(*self.spec.processors[self._image_key].size)
        loaded = self.loaded
        ids = loaded.prompt.encode(SELF_TEST_INSTRUCTION)
        if self._options.self_test and weights is None:
            self_test.check_vision(loaded.model, images, ids, folder)
        if fast:
            self._loaded = replace(loaded, engine=self._make_engine(loaded, folder, images, ids, weights))
        if self._options.compile and self.loaded.engine is not None:
            logger.info("policy.compile: nothing to do, the engine has kernels and graphs of its own")
        elif self._options.compile:
            seconds = reference.compile_towers(loaded.model, images[0])
            logger.info("policy.compile: torch.compile took %.1f s for the vision towers", seconds)
        _only(self._answer(self.loaded, [_Asked(self.start_session(), ids, images[0], 0)]))

    def _make_engine(
        self,
        loaded: Loaded,
        folder: Path,
        images: Sequence[UInt8Array],
        prompt: IntArray,
        weights: DecoderWeights | None,
    ) -> Engine | None:
        """Return a warm engine that passed its test, or None if ``auto`` has to fall back."""
        count, engine = loaded.statistics.dimension, None
        try:
            ops, encode, strict = None, None, self._options.engine != "auto"
            if self._options.self_test:
                encode = checked_encoder(loaded.model, images, strict=strict)
            if self._options.self_test and weights is not None:
                ops = checked(make_ops(weights.device), weights, strict=strict)
            engine = make_engine(
                loaded.model, count, drafts=self._options.drafts, weights=weights, ops=ops, encode=encode
            )
            engine.warm_up([len(prompt), LONG_PROMPT])
            camera = self._camera.each[self._camera.keys.index(self._image_key)]
            noise, _ = self_test.two_images(camera.height, camera.width)
            self_test.check_resizing(engine, Preprocessor(self._camera, self.spec).raw(noise))
            if self._options.self_test and weights is None:
                self_test.check_engine(loaded.model, engine, images, prompt, count)
            if self._options.self_test:
                self_test.fit_guard(engine, images, prompt)
        except Exception as error:
            if engine is not None:
                engine.close()
            # Quantised weights exist in the engine's own format only, so there is no fallback.
            if self._options.engine != "auto" or weights is not None or isinstance(error, DeviceLostError):
                raise
            logger.warning(
                "policy.engine: no engine, using the reference path, which is several times slower: %s. "
                "Set policy.engine:=reference to silence this warning",
                error,
            )
            return None
        if self._options.self_test and weights is not None:
            self_test.check_engine_vision(engine, images, prompt, folder)
        return engine


def _only(answers: Sequence[ActionChunk | VlaRosError]) -> ActionChunk:
    """Return the result of a batch of one, or raise its error."""
    [answer] = answers
    if isinstance(answer, VlaRosError):
        raise answer
    return answer
