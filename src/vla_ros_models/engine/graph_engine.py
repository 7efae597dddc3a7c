"""Base class of the engines: graphs by kind of batch and padded prompt length, image upload, lost devices."""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_ros.errors import ConfigError, DeviceLostError
from vla_ros.types import RawImage
from vla_ros_models.engine.device_errors import raise_explained
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.passes import Passes
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.resizer import ImageResizer
from vla_ros_models.engine.runner import Runner, Stage, make_runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Buckets:
    """Padded text lengths, so that a new instruction rarely needs new graphs.

    A sequence is BOS, the patches, the rest of the prompt, the drafted tokens, and padding that no other token
    attends to. All but the patches form one row of text tokens.
    """

    patches: int  # patch tokens of one image
    answer: int  # tokens to decode (7 for OpenVLA)
    lengths: tuple[int, ...]  # sequence lengths, ascending, with the patches

    @classmethod
    def up_to(cls, patches: int, answer: int, max_positions: int, step: int = 32) -> "Buckets":
        """Return multiples of ``step`` up to twice the patches, and every fourth multiple beyond."""
        room = max_positions - answer  # a verifying pass may write beyond the last token, but not beyond the tables
        lengths = []
        length = -(-(patches + answer + 1) // step) * step
        while length < room:
            lengths.append(length)
            length += step if length < 2 * patches + step else 4 * step
        if room >= patches + answer + 1:
            lengths.append(room)
        if not lengths:
            raise ConfigError(
                f"the decoder has {max_positions} positions, too few for {patches} patches and {answer} tokens"
            )
        return cls(patches, answer, tuple(lengths))

    def text(self, length: int) -> int:
        """Return the number of text tokens in a bucket of ``length``: all but the patches."""
        return length - self.patches

    def choose(self, prompt: int, among: Sequence[int] | None = None) -> int | None:
        """Return the shortest length (of ``among``, or of all) that holds a prompt and its draft, or None.

        ``prompt`` counts tokens with BOS, without patches. Lengths are ascending.
        """
        found = self.lengths if among is None else among
        at = bisect_left(found, self.patches + prompt + self.answer - 1)
        return found[at] if at < len(found) else None

    def require(self, prompt: int) -> int:
        """Like :meth:`choose`, but raise ConfigError if the prompt is longer than the decoder allows."""
        length = self.choose(prompt)
        if length is None:
            longest = self.lengths[-1] - self.patches - self.answer + 1
            raise ConfigError(
                f"policy.instruction: {prompt} tokens with the prompt template, the model has room for "
                f"{longest}; shorten it"
            )
        return length


P = TypeVar("P")


class GraphCache(Generic[P]):
    """Graphs by sequence length.

    A prompt runs on the shortest captured graphs that fit it. If a shorter length would fit, a second thread
    captures it; until then, the prompt runs on longer graphs or, if there are none, without graphs. ``build``
    creates the stages of a length with their own buffers, ``prepare`` captures them. Without ``background``, the
    calling thread captures a missing length immediately, unless that is not ``quick`` and longer graphs fit.

    Attributes:
        failures: Lengths whose capture failed, with the reason.
    """

    def __init__(
        self, buckets: Buckets, build: Callable[[int], P], prepare: Callable[[P], None], background: bool = True,
        quick: bool = True,
    ) -> None:  # fmt: skip
        self._buckets = buckets
        self._build = build
        self._prepare = prepare
        self._worker = ThreadPoolExecutor(1, "capture") if background else None
        self._quick = quick
        self._captures: dict[int, Future[None]] = {}
        self._ready: dict[int, P] = {}
        self._plain: dict[int, P] = {}
        self.failures: dict[int, Exception] = {}

    @property
    def ready(self) -> tuple[int, ...]:
        return tuple(sorted(self._ready))

    def ensure(self, length: int) -> None:
        """Capture a length now; raises any error of building or capturing."""
        if length not in self._ready:
            built = self._build(length)
            self._prepare(built)
            self._ready[length] = built

    def take(self, prompt: int) -> P:
        """Return stages that can run a prompt of this many tokens now."""
        best = self._buckets.require(prompt)
        if (ready := self._ready.get(best)) is not None:
            return ready
        longer = self._buckets.choose(prompt, self.ready)
        if self._worker is None and best not in self.failures and (self._quick or longer is None):
            self.ensure(best)
        if best in self._ready:
            return self._ready[best]
        if self._worker is not None and best not in self._captures:
            self._captures[best] = self._worker.submit(self._work, best)
        if longer is not None:
            return self._ready[longer]
        if best not in self._plain:
            self._plain[best] = self._build(best)
        return self._plain[best]

    def at(self, length: int) -> P:
        """Return captured stages."""
        return self._ready[length]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the captures in the background; return False after ``timeout`` seconds (None: never)."""
        return not wait_for(self._captures.values(), timeout).not_done

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._ready.clear()
        self._plain.clear()

    def _work(self, length: int) -> None:
        try:
            self.ensure(length)
        except Exception as error:
            logger.warning("sequence length %d runs without graphs: %s", length, error)
            self.failures[length] = error
            return
        self._plain.pop(length, None)


class StageGraphs:
    """Static buffers and the stages over them by name: as functions, or captured as graphs."""

    stages: dict[str, Stage]
    checks: Mapping[str, Callable[[], Any]] = MappingProxyType({})
    """Further functions over the buffers, which are never captured."""
    key = ""
    """Kind of batch and padded length, which name the graphs to other ranks."""

    def capture(self, runner: Runner) -> None:
        """Replace the stages with captured graphs."""
        with torch.inference_mode():
            self.stages = {name: runner.capture(stage) for name, stage in self.stages.items()}

    def lead(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with the name of a stage or check before it runs."""

        def leading(name: str, run: Callable[[], Any]) -> Callable[[], Any]:
            def told() -> Any:
                tell(name)
                return run()

            return told

        self.stages = {name: leading(name, stage) for name, stage in self.stages.items()}
        self.checks = {name: leading(name, check) for name, check in self.checks.items()}


K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
G = TypeVar("G", bound=StageGraphs)


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
    """An engine with one graph cache per kind of batch, for images of ``size`` (height, width). Not thread-safe.

    ``runner`` defaults to that of ``device``. If the engine is split over ``ranks``, that of rank 0 answers and
    leads the others, which call :meth:`follow`; kinds are then integers, and nothing is captured in the background,
    because all ranks must run their stages in the same order.
    """

    def __init__(
        self, device: torch.device, size: tuple[int, int], buckets: Buckets, runner: Runner | None = None,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.runner, self.buckets, self.device = runner or make_runner(device), buckets, device
        self._ranks = Ranks() if ranks is None else ranks
        if self._ranks.count > 1:
            self.runner.watch = self._ranks.check
        self._resizer = ImageResizer(size, device, self.runner)
        self._caches: dict[K, GraphCache[G]] = {}
        self._lost: DeviceLostError | None = None
        self._inference_mode = torch.inference_mode()

    @abstractmethod
    def _build(self, kind: K, length: int) -> G:
        """Allocate the buffers of one kind of batch and one padded length."""

    def passes(self, ops: Ops, layers: int) -> Passes:
        """Return passes over the first layers, for ``vla-ros tune``; none if no kernel has tiles to choose."""
        return {}

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

    @torch.inference_mode()
    def follow(self) -> None:
        """Obey rank 0 until it ends."""
        with self.runner.stream():
            for order in self._ranks.orders():
                name, kind, length = order.split()
                cache = self._of(int(kind))  # type: ignore[arg-type]
                if name == "capture":
                    cache.ensure(int(length))
                    continue
                graphs = cache.at(int(length))
                {**graphs.stages, **graphs.checks}[name]()

    def _run(self, call: Callable[[], R], loading: bool = False) -> R:
        """Call on the device's stream; once the device is lost, raise the same error every time.

        Entering a generator's context, or an inference mode that is yet to be made, takes 20 us after a rest.
        """
        if self._lost is not None:
            raise self._lost
        try:
            try:
                with self._inference_mode, self._ranks.running(loading), self.runner.stream():
                    return call()
            except RuntimeError as error:
                raise_explained(error, self.device)
        except DeviceLostError as error:
            self._lost = error
            raise

    def _capture(self, kind: K, prompts: Sequence[int]) -> None:
        """Capture graphs for prompts of these lengths in tokens. Raises ConfigError if a prompt is too long."""
        lengths = {self.buckets.require(prompt) for prompt in prompts}
        if self._ranks.count > 1:  # later it would interrupt inferences
            lengths = {length for length in self.buckets.lengths if min(lengths) <= length <= max(lengths)}

        def capture() -> None:
            for length in sorted(lengths, reverse=True):
                self._of(kind).ensure(length)

        self._run(capture, loading=True)

    def _of(self, kind: K) -> GraphCache[G]:
        if kind not in self._caches:
            build, background = partial(self._build_on_all, kind), self.runner.graphs and self._ranks.count == 1
            self._caches[kind] = GraphCache(
                self.buckets, build, self._prepare, background, quick=not self.runner.graphs
            )
        return self._caches[kind]

    def _build_on_all(self, kind: K, length: int) -> G:
        if self._leads:
            self._ranks.tell(f"capture {kind} {length}")
        graphs = self._build(kind, length)
        graphs.key = f"{kind} {length}"
        return graphs

    def _prepare(self, graphs: G) -> None:
        graphs.capture(self.runner)
        if self._leads:
            graphs.lead(lambda name: self._ranks.tell(f"{name} {graphs.key}"))

    @property
    def _leads(self) -> bool:
        return self._ranks.count > 1 and self._ranks.rank == 0

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
