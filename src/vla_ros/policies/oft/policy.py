"""OpenVLA-OFT behind the package's :class:`~vla_ros.policies.base.Policy`."""

from __future__ import annotations

import gc
import logging
import re
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.contract.parts import Part, parse_parts
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.engine.device_ops import make_ops
from vla_ros.engine.kernel_check import checked
from vla_ros.engine.resizer import on_device
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import CheckpointError, ConfigError, DeviceLostError, ImageError, VlaRosError
from vla_ros.policies.base import Policy, Progress, Session, no_progress, options_of
from vla_ros.policies.checkpoint_files import checkpoint_folder
from vla_ros.policies.devices import choose_device, explain_out_of_memory
from vla_ros.policies.oft.build import (
    check_chunks,
    check_vision,
    make_chunk_engine,
    normalize_state,
    plain_inference,
)
from vla_ros.policies.oft.checkpoint import layout_of, read_weights
from vla_ros.policies.oft.inference import Asked, Chunk, ChunkInference
from vla_ros.policies.oft.network import OFTModel
from vla_ros.policies.oft.options import OFTOptions
from vla_ros.policies.oft.processors import OFTResize
from vla_ros.policies.openvla import memory
from vla_ros.policies.openvla.actions import QUANTILES, ActionBins, ActionStatistics, choose, read_statistics
from vla_ros.policies.openvla.architecture import read_architecture
from vla_ros.policies.openvla.build_engine import fill_quantized
from vla_ros.policies.openvla.choices import check_attention, choose_dtype, choose_engine
from vla_ros.policies.openvla.loading import check_weights, empty, fill
from vla_ros.policies.openvla.policy import LONG_PROMPT, SELF_TEST_INSTRUCTION
from vla_ros.policies.openvla.prompt import PromptEncoder, load_prompt_encoder
from vla_ros.policies.openvla.self_test import two_images
from vla_ros.policies.openvla.vision_encoder import VisionEncoder, checked_encoder
from vla_ros.types import ActionChunk, FloatArray, IntArray, Observation, RawImage, UInt8Array

logger = logging.getLogger(__name__)

STATE = "state"
BOUNDS = {"q99": QUANTILES, "min_max": ("min", "max")}
GRIPPER = "0..1"
"""LIBERO's and Bridge's grippers: 0 closed, 1 open."""
MARGIN = 1e-8
"""Added to the width of every range, as in the published code."""


@dataclass(frozen=True)
class Platform:
    """Constants that the published code derives from a robot's name.

    Attributes:
        chunk: K.
        action: D.
        normalization: As ``policy.normalization``.
        camera_side: As ``policy.camera_side``.
    """

    chunk: int
    action: int
    normalization: str = "q99"
    camera_side: int = 0


PLATFORMS = {"libero": Platform(8, 7), "aloha": Platform(25, 14, "min_max", 256), "bridge": Platform(5, 7)}
"""By the name of the preset."""


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint; ``state`` is None if it takes none."""

    model: OFTModel
    prompt: PromptEncoder
    bins: ActionBins
    action: ActionStatistics
    state: ActionStatistics | None
    inference: ChunkInference
    advice: partial[str]
    bounds: tuple[str, str]


@dataclass
class OFTSession(Session):
    """One robot's encoded instruction and noise.

    Attributes:
        random: Draws the noise that a diffusion head starts from.
    """

    random: np.random.Generator
    instruction: str = ""
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


class OFTPolicy(Policy):
    """Answers one to three images, an instruction and possibly a state with a chunk of actions."""

    Options = OFTOptions

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, OFTOptions)
        self._keys, self._features = config.camera.keys, config.features
        self._preset = config.preset
        self.spec = PolicySpec(images=tuple(ImageFeature(key) for key in self._keys))
        self._loaded: Loaded | None = None

    @property
    def loaded(self) -> Loaded:
        """The network with its preprocessing and postprocessing.

        Raises:
            VlaRosError: :meth:`load` has not been called.
        """
        if self._loaded is None:
            raise VlaRosError("OpenVLA-OFT: not loaded; call load() first")
        return self._loaded

    def load(self, progress: Progress = no_progress) -> None:
        """Read the checkpoint, check that its parts fit and that memory suffices, test and warm up.

        Raises:
            CheckpointError: Files are missing, damaged, do not fit together, or the model does not see.
            ConfigError: An option does not fit the checkpoint or this machine.
            OutOfMemoryError: It does not fit; the text lists the options that would.
        """
        self.close()
        options = self._options
        folder = checkpoint_folder(options.checkpoint)
        base = checkpoint_folder(options.base) if options.base else None
        platform = PLATFORMS.get(self._preset)
        chunk = options.chunk or (platform.chunk if platform else 0)
        if not chunk:
            raise ConfigError(
                "policy.chunk: no file of the checkpoint says how many actions a chunk has; set preset (libero: 8, "
                "aloha: 25, bridge: 5), or policy.name:=oft and policy.chunk"
            )
        if platform and chunk != platform.chunk:
            raise ConfigError(
                f"policy.chunk: found {chunk}, and preset {self._preset} means {platform.chunk}; leave one out"
            )
        normalization = options.normalization
        if normalization == "auto":
            normalization = platform.normalization if platform else "q99"
        side = options.camera_side
        if side < 0:
            side = platform.camera_side if platform else 0
        keys = self._keys[: options.images or None]
        if len(keys) < options.images:
            raise ConfigError(
                f"policy.images: the checkpoint takes {options.images} images, found camera.keys "
                f"{list(self._keys)}; add the missing cameras, in the order of its training"
            )
        if options.threads:
            torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        dtype = choose_dtype(options, device)
        check_attention(options.attention, device, dtype)
        fast = choose_engine(options, device) == "graph"

        architecture = read_architecture(base or folder)
        own = folder if (folder / "dataset_statistics.json").exists() else base or folder
        bounds = BOUNDS[normalization]
        action = choose(read_statistics(own, bounds=bounds, margin=MARGIN), options.unnorm_key)
        if platform and platform.action != action.dimension:
            raise ConfigError(
                f"preset: {self._preset} has actions of {platform.action} numbers, the checkpoint's statistics of "
                f"'{action.key}' have {action.dimension}; it was trained for another robot"
            )
        weights = read_weights(folder, base)
        layout = layout_of(weights, architecture, folder, len(keys), chunk, action.dimension)
        state = None
        if layout.state:
            state = choose(read_statistics(own, "proprio", bounds, MARGIN), action.key)
            if state.dimension != layout.state:
                raise CheckpointError(
                    f"{folder}: proprio_projector takes {layout.state} numbers, the statistics of "
                    f"'{state.key}' have {state.dimension}; the files belong to different checkpoints"
                )
        reserved = len(keys) * architecture.patches - architecture.patches + layout.extras + layout.slots + 1
        prompt = load_prompt_encoder(base or folder, architecture, "auto", reserved)
        quantization = "none" if fast else options.quantization
        model = empty(lambda: OFTModel(architecture, layout, options.attention), quantization)
        check_weights(model, weights.manifest, folder)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        need = memory.check_memory(shapes, architecture, dtype, options.quantization, str(device))
        logger.info("OpenVLA-OFT %s: %s; %s", folder.name, layout, need)
        progress(0.0, need)
        advice = partial(memory.advise, shapes, architecture, str(device))
        with explain_out_of_memory(str(device), advice):
            torch_dtype = getattr(torch, dtype)

            def partly(share: float, what: str) -> None:
                progress(0.95 * share, what)

            decoder = None
            if fast and options.quantization != "none":
                decoder = fill_quantized(model, weights.produce, device, torch_dtype, options.quantization, partly)
            else:
                fill(model, weights.produce, device, torch_dtype, partly)
            size = (architecture.image_size, architecture.image_size)
            processor = OFTResize(size, options.crop_area, side)
            self.spec = PolicySpec(
                images=tuple(ImageFeature(key, processor) for key in keys),
                state=(StateFeature(self._state_key(), size=layout.state),) if layout.state else (),
                action=self._action(action.dimension),
                dimension=action.dimension,
                horizon=layout.chunk,
                noise=(layout.chunk, layout.action) if layout.head == "diffusion" else (),
            )
            progress(0.95, "self-test")
            inference = self._start(model, prompt, fast, decoder)
            bins = ActionBins(architecture.action_vocab_size, architecture.action_bins)
            self._loaded = Loaded(model, prompt, bins, action, state, inference, advice, bounds)
        progress(1.0, f"OpenVLA-OFT {folder.name} on {device} in {dtype}, un-normalised by '{action.key}'")

    def start_session(self) -> OFTSession:
        """Start a session with no instruction and fresh noise."""
        return OFTSession(np.random.default_rng(None if self._options.seed < 0 else self._options.seed))

    def infer(self, session: OFTSession, observation: Observation) -> ActionChunk:
        """Answer one observation.

        Args:
            session: Of the robot.
            observation: Has the images and the state that ``spec`` names.

        Returns:
            A chunk. ``info`` of a discrete checkpoint: ``logit_margins`` and ``outside_bins``.

        Raises:
            ImageError: An image is missing or of another size or type.
            ConfigError: The instruction is empty or too long, or the state is missing.
            OutOfMemoryError: The device has no room left.
            VlaRosError: The network's output holds NaN or Inf.
        """
        loaded = self.loaded
        if session.instruction != observation.instruction or not session.tokens.size:
            session.tokens = loaded.prompt.encode(observation.instruction)
            session.instruction = observation.instruction
        began = time.perf_counter()
        images, state = self._images(observation), self._state(loaded, observation)
        layout = loaded.model.layout
        noise = None
        if layout.head == "diffusion":
            drawn = session.random.standard_normal((layout.chunk, layout.action))
            noise = drawn if observation.noise is None else observation.noise
        prepared = time.perf_counter()
        with explain_out_of_memory(str(loaded.model.device), loaded.advice):
            chunk = loaded.inference.answer(Asked(images, session.tokens, state, noise))
        answered = time.perf_counter()
        normalized, info = _numbers(loaded, chunk)
        actions = self._gripper(loaded.action.unnormalize(normalized))
        return ActionChunk(
            actions=actions,
            stamp=observation.stamp,
            normalized=normalized,
            tokens=chunk.tokens,
            stages_ms={
                "preprocess": 1e3 * (prepared - began),
                **chunk.stages_ms,
                "post": 1e3 * (time.perf_counter() - answered),
            },
            info={"prompt_tokens": len(session.tokens), **info},
        )

    def other_statistics(self, normalized: FloatArray) -> dict[str, FloatArray]:
        """See :class:`~vla_ros.policies.base.Policy`."""
        own, folder = self.loaded.action, checkpoint_folder(self._options.checkpoint)
        found = read_statistics(folder, bounds=self.loaded.bounds, margin=MARGIN)
        return {
            key: statistics.unnormalize(normalized)
            for key, statistics in found.items()
            if key != own.key and statistics.dimension == own.dimension
        }

    def close(self) -> None:
        """Free the weights."""
        if self._loaded is None:
            return
        cuda = self._loaded.model.device.type == "cuda"
        self._loaded.inference.close()
        self._loaded = None
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()

    def _state_key(self) -> str:
        """The name of the only state vector that ``features.state`` declares, else :data:`STATE`."""
        declared = [re.split(r"[\s=\[]", text.strip(), maxsplit=1)[0] for text in self._features.state]
        return declared[0] if len(declared) == 1 else STATE

    def _action(self, dimension: int) -> tuple[Part, ...]:
        """What the numbers are: deltas and a gripper of single arms; of others ``features.action`` says it."""
        if dimension != PolicySpec.dimension:
            return ()
        declared = parse_parts(" + ".join(self._features.action), action=True) if self._features.action else ()
        ranges = [part.form for part in declared if part.quantity == "gripper" and part.range is not None]
        return Part("arm", "tip_delta"), Part("arm", "gripper", ranges[0] if len(ranges) == 1 else GRIPPER)

    def _gripper(self, actions: FloatArray) -> FloatArray:
        """Actions whose gripper is in the range that ``features.action`` names instead of 0 to 1."""
        column = self.spec.gripper
        if column is None or not self.spec.action or (ends := self.spec.action[-1].range) is None:
            return actions
        actions = actions.copy()
        actions[:, column] = ends[0] + actions[:, column] * (ends[1] - ends[0])
        return actions

    def _images(self, observation: Observation) -> list[UInt8Array] | list[RawImage]:
        """The images in the spec's order, as the cameras sent them where the engine's device processes them."""
        keys = self.spec.image_keys
        raw = [observation.raw_images[key] for key in keys if key in observation.raw_images]
        if self.loaded.inference.runner.graphs and len(raw) == len(keys) and all(map(on_device, raw)):
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
        """The state in [-1, 1]."""
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
        """The engine's inference if it passes its tests, else plain torch's."""
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


def _numbers(loaded: Loaded, chunk: Chunk) -> tuple[FloatArray, dict[str, object]]:
    """Normalised actions [K, D] and what else is known of them."""
    if chunk.tokens is None:
        return chunk.normalized, {}
    normalized = loaded.bins.decode(chunk.tokens).reshape(chunk.normalized.shape)
    margins = tuple(float(margin) for margin in chunk.margins)
    return normalized, {"logit_margins": margins, "outside_bins": loaded.bins.outside(chunk.tokens)}
