"""Base class of policies that run a network: device and data type, loading, inputs, batches, self-test."""

import gc
import logging
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch

from vla_ros.config import Config
from vla_ros.config.checkpoints import base_folder
from vla_ros.errors import CheckpointError, ConfigError, ImageError, VlaRosError
from vla_ros.policies.base import Policy, Progress, Session, no_progress, options_of
from vla_ros.policies.options import NetworkOptions
from vla_ros.types import ActionChunk, FloatArray, Observation, RawImage, UInt8Array
from vla_ros_models.checkpoint_files import StoredTensor, checkpoint_folder
from vla_ros_models.engine.fp8 import CAPABILITY
from vla_ros_models.engine.graph_engine import GraphEngine
from vla_ros_models.engine.resizer import resizes
from vla_ros_models.engine.tolerances import SEES
from vla_ros_models.evidence import require_evidence
from vla_ros_models.memory import MemoryCheck
from vla_ros_models.training import Trainable
from vla_ros_models.view import read_view

logger = logging.getLogger(__name__)


def choose_device(text: str) -> torch.device:
    """Return ``policy.device`` as a torch device of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda:0" if count else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"policy.device: found '{text}', expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= count:
        raise ConfigError(
            f"policy.device: '{text}' is not available; torch {torch.__version__} sees {count} CUDA devices"
        )
    return torch.device("cuda", device.index or 0)


def choose_dtype(dtype: str, quantization: str, device: torch.device) -> str:
    """Resolve ``policy.dtype``, and check that the device supports the quantisation."""
    quantized = quantization != "none"
    if dtype == "auto":
        dtype = "bfloat16" if quantized or device.type == "cuda" else "float32"
    if quantized and dtype != "bfloat16":
        raise ConfigError(
            f"policy.dtype: '{dtype}' does not work with policy.quantization '{quantization}', which computes in "
            "bfloat16; set auto or bfloat16"
        )
    if quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        found = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"policy.quantization: fp8 needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (Ada, Hopper or "
            f"later), but {device} has {found[0]}.{found[1]}; choose another format"
        )
    return dtype


SELF_TEST_INSTRUCTION = "pick up the red cube"


Images = Mapping[str, UInt8Array | RawImage]
"""One observation's images, in the spec's order: all processed or all raw."""


class Loaded(Protocol):
    """A loaded model."""

    @property
    def engine(self) -> GraphEngine[Any, Any] | None:
        """Runs the model, and holds graphs and buffers; None if the model runs without."""


L = TypeVar("L", bound=Loaded)
S = TypeVar("S", bound=Session)
R = TypeVar("R")


@dataclass(frozen=True)
class Placement:
    """The device and the data type of a network."""

    device: torch.device
    dtype: str  # name of the data type of activations and unquantised weights

    def __str__(self) -> str:
        return f"{self.device} in {self.dtype}"


@dataclass(frozen=True, eq=False)
class Asked(Generic[S, R]):
    """An observation with its session and the request for the model."""

    session: S
    observation: Observation
    request: R


class NetworkPolicy(Policy, Generic[L, S, R]):
    """A policy that runs a network in this process.

    Subclasses implement :meth:`_open`, :meth:`_build`, :meth:`_request` and :meth:`_answer`.

    Attributes:
        title: Name of the policy in messages.
        takes_any_size: True if the model resizes images itself.
    """

    Options: ClassVar[type[NetworkOptions]] = NetworkOptions
    title: ClassVar[str]
    takes_any_size: ClassVar[bool] = False
    _memory: MemoryCheck  # the check for the model that :meth:`_open` opened

    def __init__(self, config: Config) -> None:
        self._options = options_of(config, self.Options)
        self._loaded: L | None = None
        self._view = ""  # SHA-256 of ``policy.view``, once it was read

    @property
    def loaded(self) -> L:
        """The loaded model; raises VlaRosError before :meth:`load`."""
        if self._loaded is None:
            raise VlaRosError(f"{self.title}: not loaded; call load() first")
        return self._loaded

    @property
    def folder(self) -> Path:
        """The checkpoint's folder; raises CheckpointError if the folder is missing."""
        return checkpoint_folder(self._options.checkpoint)

    def load(self, progress: Progress = no_progress) -> None:
        """Check the files and the memory, load the weights, warm up and run the self-test."""
        self.close()
        options = self._options
        if options.threads:
            torch.set_num_threads(options.threads)
        if options.evidence == "require":
            require_evidence(Path(options.view).expanduser().parent if options.view else self.folder)
        where = self._placement()
        opened, name = self._open(where), f"{self.title} {self.folder.name}"
        need = self._memory.require(where.dtype, options.quantization)
        logger.info("%s: %s", name, need)
        progress(0.0, need)
        with self._memory.explained():
            try:
                self._build(opened, where, lambda share, what: progress(0.95 * share, what))
                self.spec = replace(self.spec, view=self._view)
                progress(0.95, "self-test" if options.self_test else "warm-up")
                self._try_out()
            except BaseException:
                self.close()
                raise
        progress(1.0, f"{name} on {where}{self._details()}")

    def describe_memory(self) -> str:
        where = self._placement()
        self._open(where)
        return self._memory.table(where.dtype, self._options.quantization)

    def _placement(self) -> Placement:
        options, device = self._options, choose_device(self._options.device)
        return Placement(device, choose_dtype(options.dtype, options.quantization, device))

    def infer(self, session: S, observation: Observation) -> ActionChunk:
        """Infer a chunk from one observation, as :meth:`infer_batch` does."""
        [answer] = self.infer_batch([(session, observation)])
        if isinstance(answer, VlaRosError):
            raise answer
        return answer

    def infer_batch(self, requests: Sequence[tuple[S, Observation]]) -> list[ActionChunk | VlaRosError]:
        """Infer for several robots; equally many images, all processed or all raw, make a batch."""
        answers: dict[int, ActionChunk | VlaRosError] = {}
        groups: dict[tuple[int, bool], dict[int, Asked[S, R]]] = {}
        for row, (session, observation) in enumerate(requests):
            try:
                images = self._images(observation)
                asked = Asked(session, observation, self._request(session, observation, images))
            except VlaRosError as error:  # an invalid request must not affect the others
                answers[row] = error
                continue
            raw = any(isinstance(image, RawImage) for image in images.values())
            groups.setdefault((len(images), raw), {})[row] = asked
        for group in groups.values():
            with self._memory.explained():
                answers.update(zip(group, self._answer(list(group.values())), strict=True))
        return [answers[row] for row in range(len(requests))]

    def prepare(self, batch: int) -> bool:
        """Capture graphs for typical and long prompts; False if the model infers for one robot at a time."""
        with self._memory.explained():
            return self._warm_up(batch)

    def page_locked(self, size: int) -> UInt8Array | None:
        engine = self.loaded.engine
        return None if engine is None else engine.runner.page_locked(size)

    def trainable(self, where: Placement, recompute_layers: bool = True, **options: Any) -> Trainable:
        """Load the checkpoint for training onto a device; matrices have the type that ``where`` states.

        With ``recompute_layers``, the backward pass computes layers again instead of keeping what they computed.
        ``options`` are the family's own, of its loss.
        """
        raise ConfigError(f"{self.title}: not trained here; use lerobot-train")

    def close(self) -> None:
        """Unload the model and free its memory."""
        if self._loaded is None:
            return
        if (engine := self._loaded.engine) is not None:
            engine.close()
        self._loaded = None
        gc.collect()
        if self._memory.device.startswith("cuda"):  # a CPU policy must not disturb another's capture
            torch.cuda.empty_cache()

    def _try_out(self) -> None:
        """Capture graphs and infer once; with ``policy.self_test``, twice, to compare chunks."""
        self._warm_up(1)
        size, numbers = self.spec.images[0].processor, []
        assert size is not None
        for image in two_images(*size.size)[: 2 if self._options.self_test else 1]:
            chunk = self.infer(
                self.start_session(),
                Observation(
                    dict.fromkeys(self.spec.image_keys, image),
                    SELF_TEST_INSTRUCTION,
                    stamp=0,
                    state={one.key: np.zeros(one.size) for one in self.spec.state},
                    noise=np.zeros(self.spec.noise) if self.spec.noise else None,
                    points={key: np.full((*size.size, 3), np.nan, np.float32) for _, key in self.spec.points},
                ),
            )
            numbers.append(np.array(chunk.info.get("logit_margins", chunk.normalized), np.float64))
        if self._options.self_test:
            check_that_it_sees(numbers[0], numbers[1], self.folder)

    @abstractmethod
    def start_session(self) -> S:
        """See :class:`~vla_ros.policies.base.Policy`."""

    @abstractmethod
    def _open(self, where: Placement) -> Any:
        """Read all files except the weights' data, check them, and set :attr:`_memory`."""

    @abstractmethod
    def _build(self, opened: Any, where: Placement, progress: Progress) -> None:
        """Load the weights, and set :attr:`loaded` and ``spec``; ``opened`` is from :meth:`_open`."""

    @abstractmethod
    def _request(self, session: S, observation: Observation, images: Images) -> R:
        """Make the model's request."""

    @abstractmethod
    def _answer(self, asked: Sequence[Asked[S, R]]) -> Iterable[ActionChunk | VlaRosError]:
        """Infer one chunk per request; all have equally many images, all processed or all raw."""

    @abstractmethod
    def _warm_up(self, batch: int) -> bool:
        """See :meth:`prepare`."""

    def _viewed(self, stored: Mapping[str, StoredTensor], names: Collection[str]) -> dict[str, StoredTensor]:
        """Return the stored tensors with ``policy.view`` merged; ``names`` are those that the network runs."""
        options = self._options
        if not options.view:
            return dict(stored)
        if (base := base_folder(self.folder, options.base)) is not None:
            raise ConfigError(
                f"policy.view: {self.folder} is an adapter of {base}, on which none is trained; merge it first: "
                "vla-ros convert"
            )
        view = read_view(options.view)
        self._view = view.sha256
        logger.info("%s: %s, SHA-256 %s, becomes part of the weights", view.file, view.kind, view.sha256)
        return view.merged(stored, names)

    def _details(self) -> str:
        """Return text to append to the last progress message of :meth:`load`."""
        return ""

    def _resizing_device(self) -> torch.device | None:
        """Return the device that processes raw camera images, or None if the host does."""
        engine = self.loaded.engine
        return None if engine is None else engine.device

    def _images(self, observation: Observation) -> Images:
        images, raw = observation.images, observation.raw_images
        keys = [one.key for one in self.spec.images if one.required or one.key in images or one.key in raw]
        device = self._resizing_device()
        if device and keys and all(key in raw and resizes(device, raw[key]) for key in keys):
            return {key: raw[key] for key in keys}
        missing = [key for key in keys if key not in images]
        if missing or not keys:
            raise ImageError(
                f"{self.title}: no image {missing or list(self.spec.image_keys)}; found {list(images)}"
            )
        return {key: self._checked(key, images[key]) for key in keys}

    def _state(self, observation: Observation) -> FloatArray:
        """Return the state vectors, in the spec's order, as one float64 vector; raises ConfigError if invalid."""
        parts: list[FloatArray] = [np.zeros(0)]
        for one in self.spec.state:
            part = observation.state.get(one.key)
            if part is None or part.shape != (one.size,) or not np.isfinite(part).all():
                raise ConfigError(
                    f"{self.title}: state '{one.key}' is {None if part is None else part.tolist()}, expected "
                    f"{one.size} finite numbers; bind them with features.state"
                )
            parts.append(part)
        return np.concatenate(parts)

    def _checked(self, key: str, image: UInt8Array) -> UInt8Array:
        size = ("H", "W") if self.takes_any_size else self.spec.processors[key].size
        fits = image.ndim == 3 and image.shape[2] == 3 and image.size > 0
        if image.dtype != np.uint8 or not fits or not (self.takes_any_size or image.shape[:2] == size):
            raise ImageError(
                f"{self.title}: image '{key}' is {image.dtype} {list(image.shape)}, expected uint8 "
                f"[{size[0]}, {size[1]}, 3]"
            )
        return image


def two_images(height: int, width: int) -> tuple[UInt8Array, UInt8Array]:
    """Return two different images, uint8 [height, width, 3]: noise, and one half red."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    plain = np.full((height, width, 3), 32, dtype=np.uint8)
    plain[:, : width // 2, 0] = 224
    return noise, plain


def check_that_it_sees(first: FloatArray, second: FloatArray, folder: Path) -> None:
    """Raise CheckpointError if a model returns the same numbers for two different images.

    So does a model that never runs its vision towers: with incomplete weights, or in the published code with
    versions of transformers that skip the image.
    """
    change, spread = float(np.abs(first - second).max()), float(first.std())
    if not change > SEES * spread:
        raise CheckpointError(
            f"{folder}: the model does not see: its answers to two different images differ by {change:.2g} (the "
            f"first has a standard deviation of {spread:.2g}). The vision towers or the projector are damaged or "
            "untrained; policy.self_test:=false starts it anyway"
        )
