"""Base class of the engines: image upload, graphs by kind of batch, stage times, lost devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.engine.device_errors import explain_device_errors
from vla_ros.engine.graph_cache import Buckets, GraphCache
from vla_ros.engine.resizer import ImageResizer
from vla_ros.engine.runner import Runner
from vla_ros.errors import ConfigError, DeviceLostError
from vla_ros.types import RawImage


class Capturable(Protocol):
    """Stages that have their own buffers."""

    def capture(self, runner: Runner) -> None:
        """Replace the stages with captured graphs."""


K = TypeVar("K", bound=Hashable)
G = TypeVar("G", bound=Capturable)


class StageClock:
    """Times the stages of one inference, without synchronising between them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._start = runner.mark()
        self._ends: dict[str, Any] = {}

    def end(self, stage: str) -> None:
        """Record the end of a stage, which is the start of the next."""
        self._ends[stage] = self._runner.mark()

    def milliseconds(self) -> dict[str, float]:
        """Return the time of each stage; waits for the last stage."""
        starts = [self._start, *self._ends.values()]
        pairs = zip(self._ends.items(), starts, strict=False)
        return {stage: self._runner.milliseconds(start, end) for (stage, end), start in pairs}


class GraphEngine(ABC, Generic[K, G]):
    """An engine with one graph cache per kind of batch. Not thread-safe.

    Args:
        device: Device of the engine.
        size: (height, width) of the network's images.
        buckets: Padded prompt lengths.
        runner: Runs the stages.
    """

    def __init__(self, device: torch.device, size: tuple[int, int], buckets: Buckets, runner: Runner) -> None:
        self.runner, self.buckets = runner, buckets
        self._device = device
        self._resizer = ImageResizer(size, device, runner)
        self._caches: dict[K, GraphCache[G]] = {}
        self._lost: DeviceLostError | None = None

    @abstractmethod
    def _build(self, kind: K, length: int) -> G:
        """Allocate the buffers of one kind of batch and one padded length."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for background captures; return False after ``timeout`` seconds.

        Waiting is optional: captured graphs only make later requests faster.
        """
        ready = [cache.wait(timeout) for cache in self._caches.values()]
        return self._resizer.wait(timeout) and all(ready)

    def close(self) -> None:
        """Free buffers, caches and graphs, but not the weights, which belong to the caller."""
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()
        self._resizer.clear()
        self.runner.close()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run the enclosed code on the device; once the device is lost, raise the same error every time."""
        if self._lost is not None:
            raise self._lost
        try:
            with explain_device_errors(self._device), self.runner.stream():
                yield
        except DeviceLostError as error:
            self._lost = error
            raise

    def _capture(self, kind: K, prompts: Sequence[int]) -> None:
        """Capture graphs for prompts of these lengths in tokens. Raises ConfigError if a prompt is too long."""
        with self._running():
            for length in sorted({self.buckets.require(prompt) for prompt in prompts}, reverse=True):
                self._of(kind).ensure(length)

    def _of(self, kind: K) -> GraphCache[G]:
        if kind not in self._caches:
            build = partial(self._build, kind)
            self._caches[kind] = GraphCache(
                self.buckets, build, lambda graphs: graphs.capture(self.runner), self.runner.graphs
            )
        return self._caches[kind]

    def _upload(self, images: Sequence[NDArray[Any] | RawImage], target: Tensor, clock: StageClock) -> None:
        """Copy images of the target's size, or resize camera images. Raises ConfigError if both are mixed."""
        raw = [image for image in images if isinstance(image, RawImage)]
        ready = [image for image in images if not isinstance(image, RawImage)]
        if raw and ready:
            raise ConfigError(f"engine: {len(raw)} of {len(images)} images are camera images; expected all or none")
        if raw:
            uploaded = self._resizer.upload(raw)
            clock.end("upload")
            self._resizer.resize(uploaded, target)
            clock.end("preprocess")
        else:
            self.runner.upload(target, ready[0][None] if len(ready) == 1 else np.stack(ready))
            clock.end("upload")
