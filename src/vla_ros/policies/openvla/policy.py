"""OpenVLA behind the package's :class:`~vla_ros.policies.base.Policy`: the reference path."""

from __future__ import annotations

import gc
import importlib.util
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vla_ros.config import Config
from vla_ros.config.tree import PolicyConfig
from vla_ros.engine.executor import Engine
from vla_ros.engine.weights import DecoderWeights
from vla_ros.errors import CheckpointError, ConfigError, ImageError, MissingDependencyError, VlaRosError
from vla_ros.policies.base import Progress, no_progress
from vla_ros.policies.openvla import memory
from vla_ros.policies.openvla.actions import ActionBins, ActionStatistics, choose, read_statistics
from vla_ros.policies.openvla.architecture import read_architecture
from vla_ros.policies.openvla.fast import fill_quantized, from_files, make_engine
from vla_ros.policies.openvla.loading import build_empty, check_weights, fill, read_manifest
from vla_ros.policies.openvla.model import OpenVLAModel
from vla_ros.policies.openvla.prompt import PromptEncoder, load_prompt_encoder
from vla_ros.policies.openvla.stages import StageTimer
from vla_ros.types import ActionChunk, ActionSpec, FloatArray, IntArray, Observation, UInt8Array

logger = logging.getLogger(__name__)

SELF_TEST_INSTRUCTION = "pick up the red cube"
LONG_PROMPT = 80
"""Tokens of a long prompt. Its program is made ready at the start: it answers while a better one is captured."""
SELF_TEST_THRESHOLD = 1e-4
"""Least change of a logit between two pictures, as a share of the logits' spread. Rounding stays below it."""


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
        self._options = config.policy
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
        fast = self._options.engine == "graph"
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
            observation: ``images`` has the key of ``spec.image_keys``, uint8 of ``spec.image_size``, RGB.

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
        image = self._image(observation)
        with memory.explain_out_of_memory(str(loaded.model.device), loaded.advice):
            return self._answer(loaded, image, observation.instruction, observation.stamp)

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
    def _answer(self, loaded: Loaded, image: UInt8Array, instruction: str, stamp: int) -> ActionChunk:
        ids, ids_there = self._prompt_ids(loaded, instruction)
        if loaded.engine is None:
            tokens, margins, stages = reference_answer(loaded, image, ids_there)
            info: dict[str, object] = {}
        else:
            answer = loaded.engine.answer(image[None], [ids], [self._previous])[0]
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
        height, width = self._spec.image_size
        first = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        second = np.full((height, width, 3), 32, dtype=np.uint8)
        second[:, : width // 2, 0] = 224
        loaded = self.loaded
        ids, ids_there = self._prompt_ids(loaded, SELF_TEST_INSTRUCTION)
        if self._options.self_test and weights is None:
            check_sight(loaded.model, first, second, ids_there, folder)
        if fast:
            engine = make_engine(
                loaded.model, loaded.statistics.dimension, drafts=self._options.drafts, weights=weights
            )
            engine.warm_up([len(ids), LONG_PROMPT])
            self._loaded = loaded = replace(loaded, engine=engine)
            if self._options.self_test and weights is not None:
                one, other = (engine.answer(image[None], [ids])[0] for image in (first, second))
                if np.array_equal(one.tokens, other.tokens) and np.allclose(one.margins, other.margins, 1e-4):
                    raise CheckpointError(blind(folder, "leave tokens and logit margins as they are"))
        self._answer(loaded, first, SELF_TEST_INSTRUCTION, 0)
        self._encoded = None
        self._previous = None


def blind(folder: Path, what: str) -> str:
    """Says of a checkpoint that it does not see."""
    return (
        f"{folder}: the model does not see: two different pictures {what}. The vision towers or the projector are "
        "damaged or untrained; policy.self_test:=false starts it all the same"
    )


def reference_answer(
    loaded: Loaded, image: UInt8Array, input_ids: Tensor
) -> tuple[IntArray, FloatArray, dict[str, float]]:
    """Tokens [D], logit margins [D] and stage times of the reference path."""
    model, count = loaded.model, loaded.statistics.dimension
    timer = StageTimer(model.device)
    pixels = model.normalize(_to_device(image, model.device))
    timer.mark("preprocess")
    patches = model.embed_image(pixels)
    timer.mark("vision")
    logits, cache = model.prefill(patches, input_ids, room=count)
    timer.mark("prefill")
    answer = model.greedy(logits, cache, count)
    timer.mark("decode")
    tokens, margins = answer.tokens[0].cpu().numpy(), answer.margins[0].cpu().numpy()
    return tokens, margins.astype(np.float64), timer.milliseconds()


@torch.inference_mode()
def check_sight(
    model: OpenVLAModel, first: UInt8Array, second: UInt8Array, input_ids: Tensor, folder: Path
) -> None:
    """Refuse a model whose answer does not depend on the picture.

    A model that never runs its vision still answers, always with the same action. It happens to people who load
    the published code with a transformers version that skips the picture, and with half-copied weights.

    Raises:
        CheckpointError: Logits are not finite, or equal for ``first`` and ``second``.
    """
    answers = []
    for image in (first, second):
        patches = model.embed_image(model.normalize(_to_device(image, model.device)))
        answers.append(model.prefill(patches, input_ids)[0])
    if not all(bool(torch.isfinite(answer).all()) for answer in answers):
        raise CheckpointError(f"{folder}: the first answer is NaN or Inf; the weights are damaged")
    change = (answers[0] - answers[1]).abs().max().item()
    spread = answers[0].std().item()
    if change <= SELF_TEST_THRESHOLD * spread:
        what = f"change its logits by {change:.2g} (their spread is {spread:.2g})"
        raise CheckpointError(blind(folder, what))


def checkpoint_folder(text: str) -> Path:
    """``policy.checkpoint`` as a folder that exists.

    Raises:
        CheckpointError: It is empty or names no folder.
    """
    if not text:
        raise CheckpointError("policy.checkpoint: not set; name the folder that has the checkpoint's config.json")
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"policy.checkpoint: {folder} is no folder. Nothing is downloaded at run time: fetch the checkpoint "
            "first (for example: hf download openvla/openvla-7b --local-dir DIR)"
        )
    return folder


def choose_device(text: str) -> torch.device:
    """``policy.device`` as a torch device that exists.

    Raises:
        ConfigError: It is no device, or not one of this machine.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda:0" if count else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"policy.device: '{text}'; expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= count:
        raise ConfigError(
            f"policy.device: '{text}' is not here; torch {torch.__version__} sees {count} CUDA devices"
        )
    return torch.device("cuda", device.index or 0)


def choose_dtype(options: PolicyConfig, device: torch.device) -> str:
    """``policy.dtype`` with ``auto`` resolved: bfloat16 on CUDA and for quantised weights, else float32.

    Raises:
        ConfigError: float32 is asked for together with quantisation.
    """
    quantized = options.quantization != "none"
    if options.dtype == "auto":
        return "bfloat16" if quantized or device.type == "cuda" else "float32"
    if quantized and options.dtype != "bfloat16":
        raise ConfigError(
            f"policy.dtype: '{options.dtype}' does not go with policy.quantization '{options.quantization}', "
            "which computes in bfloat16; set auto or bfloat16"
        )
    return options.dtype


def check_attention(attention: str, device: torch.device, dtype: str) -> None:
    """Refuse ``flash_attention_2`` where it cannot run.

    Raises:
        ConfigError: The device or the data type is not one that it knows.
        MissingDependencyError: flash-attn is not installed.
    """
    if attention != "flash_attention_2":
        return
    if device.type != "cuda" or dtype != "bfloat16":
        raise ConfigError(
            f"policy.attention: flash_attention_2 needs CUDA and bfloat16, here is {device} and {dtype}; set sdpa"
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise MissingDependencyError(
            "policy.attention: flash_attention_2 needs the package flash-attn, which is not installed; set sdpa"
        )


def _to_device(image: UInt8Array, device: torch.device) -> Tensor:
    # Copied (a few microseconds): views with negative strides and read-only arrays do not become tensors.
    return torch.from_numpy(image.copy())[None].to(device)
