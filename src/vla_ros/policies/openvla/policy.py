"""OpenVLA behind the package's :class:`~vla_ros.policies.base.Policy`: by the engine, or by the reference path."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vla_ros.config import Config
from vla_ros.engine.agreement import checked
from vla_ros.engine.executor import Engine, make_ops
from vla_ros.engine.preprocess import is_exact
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import DeviceLostError, ImageError, VlaRosError
from vla_ros.policies.base import Progress, no_progress, options_of
from vla_ros.policies.openvla import memory, reference, self_test
from vla_ros.policies.openvla.actions import ActionBins, ActionStatistics, choose, read_statistics
from vla_ros.policies.openvla.architecture import read_architecture
from vla_ros.policies.openvla.choices import check_attention, choose_device, choose_dtype, choose_engine
from vla_ros.policies.openvla.fast import fill_quantized, from_files, make_engine
from vla_ros.policies.openvla.loading import build_empty, check_weights, checkpoint_folder, fill, read_manifest
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.options import OpenVLAOptions
from vla_ros.policies.openvla.prompt import PromptEncoder, load_prompt_encoder
from vla_ros.policies.openvla.sight import checked_sight
from vla_ros.types import ActionChunk, ActionSpec, CameraFrame, FloatArray, IntArray, Observation, UInt8Array

logger = logging.getLogger(__name__)

SELF_TEST_INSTRUCTION = "pick up the red cube"
LONG_PROMPT = 80
"""Tokens of a long prompt. Its program is made ready at the start: it answers while a better one is captured."""


@dataclass(frozen=True)
class Loaded:
    """Everything that answers observations once a checkpoint is loaded.

    Attributes:
        model: The network, on its device.
        prompt: Instruction to tokens.
        bins: Tokens to normalised actions.
        statistics: Normalised actions to the robot's units.
        advice: What to choose when memory runs out.
        engine: Executes in place of ``model``; None on the reference path.
    """

    model: OpenVLAModel
    prompt: PromptEncoder
    bins: ActionBins
    statistics: ActionStatistics
    advice: partial[str]
    engine: Engine | None = None


class OpenVLAPolicy:
    """Answers one picture and an instruction with one action of the checkpoint, decoded greedily."""

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, OpenVLAOptions)
        self._camera = config.camera
        self._image_key = config.camera.keys[0]
        self._spec = ActionSpec(image_keys=(self._image_key,))
        self._loaded: Loaded | None = None
        self._encoded: tuple[str, IntArray, Tensor] | None = None
        self._previous: IntArray | None = None  # tokens of the last answer

    @property
    def spec(self) -> ActionSpec:
        """One picture in, one action out; dimension and image size are the checkpoint's once it is loaded."""
        return self._spec

    @property
    def loaded(self) -> Loaded:
        """The network and its two ends.

        Raises:
            VlaRosError: :meth:`load` has not been called.
        """
        if self._loaded is None:
            raise VlaRosError("OpenVLA: not loaded; call load() first")
        return self._loaded

    def load(self, progress: Progress = no_progress) -> None:
        """Read the checkpoint, check that memory suffices and that the model sees, warm up.

        Raises:
            CheckpointError: Files are missing, damaged, do not fit together, or the model does not see.
            ConfigError: An option does not fit the checkpoint or this machine.
            MissingDependencyError: bitsandbytes or flash-attn is asked for and not installed.
            OutOfMemoryError: It does not fit; the text lists the options that would.
        """
        self.close()
        folder = checkpoint_folder(self._options.checkpoint)
        if self._options.threads:
            torch.set_num_threads(self._options.threads)
        device = choose_device(self._options.device)
        dtype = choose_dtype(self._options, device)
        check_attention(self._options.attention, device, dtype)

        architecture = read_architecture(folder)
        statistics = choose(read_statistics(folder), self._options.unnorm_key)
        prompt = load_prompt_encoder(folder, architecture, self._options.prompt, statistics.dimension)
        fast = choose_engine(self._options, device) == "graph"
        # The engine quantises by itself, from the weights as they are stored.
        quantization = "none" if fast else self._options.quantization
        model = build_empty(architecture, self._options.attention, quantization)
        manifest = read_manifest(folder)
        check_weights(model, manifest, folder)

        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        need = memory.check_memory(shapes, architecture, dtype, self._options.quantization, str(device))
        logger.info("OpenVLA %s: %s", folder.name, need)
        progress(0.0, need)
        advice = partial(memory.advise, shapes, architecture, str(device))
        with memory.explain_out_of_memory(str(device), advice):
            torch_dtype = getattr(torch, dtype)

            def partly(share: float, what: str) -> None:
                progress(0.95 * share, what)

            weights = None
            if fast and self._options.quantization != "none":
                weights = fill_quantized(
                    model, from_files(manifest), device, torch_dtype, self._options.quantization, partly
                )
            else:
                fill(model, manifest, device, torch_dtype, partly)
            loaded = Loaded(
                model,
                prompt,
                ActionBins(architecture.action_vocab_size, architecture.action_bins),
                statistics,
                advice,
            )
            progress(0.95, "self-test" if self._options.self_test else "warm-up")
            self._loaded = loaded
            self._spec = ActionSpec(
                dimension=statistics.dimension,
                gripper_index=6 if statistics.dimension == 7 else None,
                image_keys=(self._image_key,),
                image_size=(architecture.image_size, architecture.image_size),
            )
            try:
                self._warm_up(folder, fast, weights)
            except BaseException:
                self.close()
                raise
        progress(1.0, f"OpenVLA {folder.name} on {device} in {dtype}, un-normalised by '{statistics.key}'")

    def infer(self, observation: Observation) -> ActionChunk:
        """Answer one observation.

        Args:
            observation: ``images`` has the key of ``spec.image_keys``, uint8 of ``spec.image_size``, RGB. The
                engine takes the picture of ``frames`` instead where it resizes that to the same bits.

        Returns:
            One action. ``info``: ``logit_margins`` (best minus second-best logit of each token),
            ``outside_bins`` (tokens that were no action tokens and got clipped), ``prompt_tokens``.

        Raises:
            ImageError: The picture is missing, of another size or type.
            ConfigError: The instruction is empty or too long.
            OutOfMemoryError: The device has no room left.
            VlaRosError: The network answers with something that is no number.
        """
        loaded = self.loaded
        images = self._images(loaded, observation)
        with memory.explain_out_of_memory(str(loaded.model.device), loaded.advice):
            return self._answer(loaded, images, observation.instruction, observation.stamp)

    def other_statistics(self, normalized: FloatArray) -> dict[str, FloatArray]:
        """What normalised actions [..., D] would mean with each other dataset of the checkpoint, by its name.

        For a diagnosis of a wrong ``policy.unnorm_key``; datasets of another dimension are left out.
        """
        own = self.loaded.statistics
        folder = checkpoint_folder(self._options.checkpoint)
        return {
            key: statistics.unnormalize(normalized)
            for key, statistics in read_statistics(folder).items()
            if key != own.key and statistics.dimension == own.dimension
        }

    def reset(self) -> None:
        """Forget the last answer, which the engine drafts from; answers do not depend on it."""
        self._previous = None

    def close(self) -> None:
        """Free the weights."""
        if self._loaded is None:
            return
        cuda = self._loaded.model.device.type == "cuda"
        if self._loaded.engine is not None:
            self._loaded.engine.close()
        self._loaded = None
        self._encoded = None
        self._previous = None
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _answer(
        self, loaded: Loaded, images: UInt8Array | list[CameraFrame], instruction: str, stamp: int
    ) -> ActionChunk:
        ids, ids_there = self._prompt_ids(loaded, instruction)
        if loaded.engine is None:
            assert isinstance(images, np.ndarray), "frames are the engine's"
            count = loaded.statistics.dimension
            tokens, margins, stages = reference.answer(loaded.model, images[0], ids_there, count)
            info: dict[str, object] = {}
        else:
            answer = loaded.engine.answer(images, [ids], [self._previous])[0]
            tokens, margins, stages = answer.tokens, answer.margins, dict(answer.stages_ms)
            info = {"draft_accepted": answer.accepted, "decoder_passes": answer.passes}
            self._previous = tokens

        started = time.perf_counter()
        if not np.isfinite(margins).all():
            raise VlaRosError("OpenVLA: the network's logits are not numbers (NaN or Inf); the frame is dropped")
        normalized = loaded.bins.decode(tokens)
        actions = loaded.statistics.unnormalize(normalized)
        stages["post"] = (time.perf_counter() - started) * 1e3
        return ActionChunk(
            actions=actions[None],
            stamp=stamp,
            normalized=normalized[None],
            tokens=tokens,
            stages_ms=stages,
            info={
                "logit_margins": tuple(float(margin) for margin in margins),
                "outside_bins": loaded.bins.outside(tokens),
                "prompt_tokens": len(ids),
                **info,
            },
        )

    def _prompt_ids(self, loaded: Loaded, instruction: str) -> tuple[IntArray, Tensor]:
        """Tokens [L] on the host and [1, L] on the device, kept until the instruction changes."""
        if self._encoded is None or self._encoded[0] != instruction:
            ids = loaded.prompt.encode(instruction)
            self._encoded = (instruction, ids, torch.from_numpy(ids)[None].to(loaded.model.device))
            self._previous = None
        return self._encoded[1:]

    def _images(self, loaded: Loaded, observation: Observation) -> UInt8Array | list[CameraFrame]:
        """The frame where the engine makes the same picture of it, else the picture [1, H, W, 3]."""
        frame = observation.frames.get(self._image_key)
        if loaded.engine is not None and frame is not None and is_exact(frame.pipeline):
            return [frame]
        return self._image(observation)[None]

    def _image(self, observation: Observation) -> UInt8Array:
        image = observation.images.get(self._image_key)
        if image is None:
            raise ImageError(f"OpenVLA: no picture '{self._image_key}', there are {list(observation.images)}")
        expected = (*self._spec.image_size, 3)
        if image.dtype != np.uint8 or image.shape != expected:
            raise ImageError(
                f"OpenVLA: picture '{self._image_key}' is {image.dtype} {list(image.shape)}, "
                f"expected uint8 {list(expected)}"
            )
        return image

    def _warm_up(self, folder: Path, fast: bool, weights: DecoderWeights | None) -> None:
        """The self-test, and one whole answer, so that the first frame is not the slow one."""
        pictures = self_test.two_pictures(*self._spec.image_size)
        loaded = self.loaded
        ids, _ = self._prompt_ids(loaded, SELF_TEST_INSTRUCTION)
        if self._options.self_test and weights is None:
            self_test.check_sight(loaded.model, pictures, ids, folder)
        if fast:
            self._loaded = replace(loaded, engine=self._make_engine(loaded, folder, pictures, ids, weights))
        if self._options.compile and self.loaded.engine is not None:
            logger.info("policy.compile: nothing to do, the engine has kernels and graphs of its own")
        elif self._options.compile:
            seconds = reference.compile_towers(loaded.model, pictures[0])
            logger.info("policy.compile: torch.compile took %.1f s for the vision towers", seconds)
        self._answer(self.loaded, pictures[0][None], SELF_TEST_INSTRUCTION, 0)
        self._encoded = None
        self._previous = None

    def _make_engine(
        self,
        loaded: Loaded,
        folder: Path,
        pictures: Sequence[UInt8Array],
        prompt: IntArray,
        weights: DecoderWeights | None,
    ) -> Engine | None:
        """A warm engine that passed its test; None where ``policy.engine`` is ``auto`` and there cannot be one."""
        count, engine = loaded.statistics.dimension, None
        try:
            ops, see, strict = None, None, self._options.engine != "auto"
            if self._options.self_test:
                see = checked_sight(loaded.model, pictures, strict=strict)
            if self._options.self_test and weights is not None:
                ops = checked(make_ops(weights.device), weights, strict=strict)
            engine = make_engine(
                loaded.model, count, drafts=self._options.drafts, weights=weights, ops=ops, see=see
            )
            engine.warm_up([len(prompt), LONG_PROMPT])
            camera = self._camera
            self_test.check_resizing(
                engine,
                CameraFrame(
                    self_test.two_pictures(camera.height, camera.width)[0],
                    camera.orientation[0],
                    camera.pipeline,
                    camera.crop_area,
                ),
            )
            if self._options.self_test and weights is None:
                self_test.check_engine(loaded.model, engine, pictures, prompt, count)
            if self._options.self_test:
                self_test.fit_guard(engine, pictures, prompt)
        except Exception as error:
            if engine is not None:
                engine.close()
            # Quantised weights exist in the engine's own format only: there is nothing to fall back on.
            if self._options.engine != "auto" or weights is not None or isinstance(error, DeviceLostError):
                raise
            logger.warning(
                "policy.engine: no engine, the reference path answers instead, several times slower: %s. "
                "policy.engine:=reference is silent about it",
                error,
            )
            return None
        if self._options.self_test and weights is not None:
            self_test.check_engine_sight(engine, pictures, prompt, folder)
        return engine
