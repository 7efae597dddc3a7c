"""Builds the policy's observations from camera messages and measurements."""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from vla_ros.contract.binding import Binding
from vla_ros.contract.spec import NOW, DeltaTimestamp
from vla_ros.contract.state import Measured, StateError, StateReader
from vla_ros.control.inputs import Snapshot
from vla_ros.control.reasons import Reason, Refused
from vla_ros.errors import ConfigError, ImageError
from vla_ros.node.depth import TRANSFORM_WAIT, DepthCameras
from vla_ros.types import Float32Array, FloatArray, Observation, RawImage, UInt8Array
from vla_ros.vision.decode import DecodedPoints, decode_points
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.preprocess import TURNS, LazyImages, Preprocessor, process

_PROCESSED, _BYTES = 32, 32 << 20  # limits of the past images kept after processing: number and size
_NONE = np.zeros((1, 1), np.float32)
_SPARE = 0.25  # s kept beyond the oldest delta timestamp: frames arrive during preparation, and some arrive late


@dataclass(frozen=True, eq=False)
class Past:
    """An undecoded frame and the inputs at its arrival."""

    stamp: int
    data: CdrBytes | None
    inputs: Snapshot


class History:
    """Keeps references to messages without copying them. Thread-safe.

    ``spans`` maps positions in ``camera.topics`` to the seconds of frames to keep; frames of other cameras are
    not kept.
    """

    def __init__(self, spans: Mapping[int, float]) -> None:
        self._spans = {camera: round(1e9 * (seconds + _SPARE)) for camera, seconds in spans.items()}
        self._frames: dict[int, deque[Past]] = {camera: deque() for camera in spans}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return True if frames of any camera are kept."""
        return bool(self._spans)

    def add(self, camera: int, past: Past) -> None:
        """Add a frame; if the clock has jumped back, forget all earlier ones."""
        frames = self._frames.get(camera)
        if frames is None:
            return
        with self._lock:
            if frames and past.stamp < frames[-1].stamp:
                frames.clear()
            if not frames or past.stamp > frames[-1].stamp:
                self._append(camera, past)

    def at(self, camera: int, stamp: int, now: Past) -> Past:
        """Return the frame since :meth:`begin_task`, not newer than ``now``, that is nearest to ``stamp``."""
        with self._lock:
            frames = self._frames[camera]
            if not frames or frames[-1].stamp < now.stamp:
                self._append(camera, now)
            known = [past for past in frames if past.stamp <= now.stamp]
        return min((*known, now), key=lambda past: abs(past.stamp - stamp))

    def begin_task(self) -> None:
        with self._lock:
            for frames in self._frames.values():
                frames.clear()

    def _append(self, camera: int, past: Past) -> None:
        frames = self._frames[camera]
        frames.append(past)
        # Keep one frame older than the oldest delta timestamp: it may be the nearest to that time.
        while len(frames) > 1 and frames[1].stamp < past.stamp - self._spans[camera]:
            frames.popleft()


class Observer:
    """Builds observations according to a binding. One thread uses it; any thread may call :meth:`remember`.

    Assign ``timeouts`` to change the allowed ages; ``depth`` takes the messages that depth images need.
    """

    def __init__(self, binding: Binding) -> None:
        config, self._binding = binding.config, binding
        self._preprocessor = Preprocessor(config.camera, binding.spec)
        self._rate = binding.spec.rate_hz or config.control.rate_hz
        self._first = next(iter(binding.cameras.values()))
        self._images = {image.key: image for image in binding.spec.images if image.key in binding.cameras}
        spans = {
            index: self._span(self._images[key].key, self._images[key].delta_timestamps)
            for key, index in binding.cameras.items()
            if self._images[key].delta_timestamps != NOW
        }
        features = [reader.feature for reader in binding.states]
        states = [self._span(each.key, each.delta_timestamps) for each in features if each.delta_timestamps != NOW]
        if states:
            spans[self._first] = max(*states, spans.get(self._first, 0.0))
        self._history = History(spans)
        self._processed: OrderedDict[tuple[int, int], UInt8Array] = OrderedDict()
        self._topics, self.timeouts = config.camera.topics, config.timeouts
        self.depth = DepthCameras(binding)

    @property
    def remembers(self) -> bool:
        """True if a feature takes past values, so that every frame must be passed to :meth:`remember`."""
        return bool(self._history)

    def begin_task(self) -> None:
        """Forget the task before: until there is a past, the first frame stands in for it.

        Rotations begin anew; within a task, their numbers continue without jumps.
        """
        self._history.begin_task()
        for reader in self._binding.states:
            reader.begin_task()
        self._processed.clear()

    def remember(self, camera: int, stamp: int, data: CdrBytes, inputs: Snapshot) -> None:
        """Add a frame of ``camera``; it is kept if the policy uses the camera's past."""
        self._history.add(camera, Past(stamp, data if self._looks_back(camera) else None, inputs))

    def observe(self, frames: Sequence[CdrBytes | None], inputs: Snapshot) -> Observation:
        """Build an observation: decode the images; orientation, crop and resize are deferred until first access.

        ``frames`` has a serialised message for each of ``camera.topics``, or None if none has come yet. Raises
        ImageError if a message is not an image, and Refused if a camera, a part of a state vector or the
        instruction is missing or stale.
        """
        if not inputs.instruction:
            raise Refused(Reason.NO_INSTRUCTION, "set policy.instruction or publish on ~/instruction")
        raw: dict[str, RawImage] = {}
        for key, index in self._binding.cameras.items():
            data = frames[index]
            if data is not None:
                raw[key] = self._preprocessor(data, index)
            elif self._images[key].required:
                raise Refused(Reason.INPUT_MISSING, f"no frame yet on {self._topics[index]}")
        if not raw:
            raise Refused(Reason.INPUT_MISSING, f"no frame yet on any of {', '.join(self._topics)}")
        stamp = next(iter(raw.values())).stamp
        spec, bound = self._binding.spec, self._binding.points
        shown = {key: raw.get(image) for image, key in (*spec.points, *spec.depth)}
        points = {key: self._points(index, frames, shown[key]) for key, index in bound.items()}
        stamps = [*(image.stamp for image in raw.values()), *(one.stamp for one, _ in points.values())]
        skew = (max(stamps) - min(stamps)) / 1e9
        if 0 < self.timeouts.camera_skew < skew:
            raise Refused(Reason.CAMERA_SKEW, f"images {skew:.3g} s apart, allowed {self.timeouts.camera_skew:g} s")
        makers = {}
        for key, image in raw.items():
            index, feature = self._binding.cameras[key], self._images[key]
            makers[key] = partial(process, image)
            if feature.delta_timestamps != NOW:
                now = Past(image.stamp, frames[index], inputs)
                past = [
                    self._history.at(index, self._when(delta, image.stamp), now)
                    for delta in feature.delta_timestamps
                ]
                makers[key] = partial(self._stack, index, past)
        single = {key: image for key, image in raw.items() if self._images[key].delta_timestamps == NOW}
        now = Past(stamp, frames[self._first] if self._looks_back(self._first) else None, inputs)
        states = dict[str, FloatArray]()
        for one in self._binding.states:
            states |= one.feature.split(self._state(one, now))
        placed = {key: points[key][0].points for _, key in spec.points if key in points}
        depth = {key: points[key][1] for _, key in spec.depth if key in points}
        images = LazyImages(makers)
        return Observation(images, inputs.instruction, stamp, states, single, points=placed, depth=depth)

    def _points(
        self, index: int, frames: Sequence[CdrBytes | None], image: RawImage | None
    ) -> tuple[DecodedPoints, Float32Array]:
        """Return the points and depth of ``image``, oriented as their camera's images; 32FC3 has no depth."""
        data = frames[index]
        topic, frame = self._topics[index], self._binding.config.robot.base_frame
        if data is None:
            raise Refused(Reason.INPUT_MISSING, f"no frame yet on {topic}")
        try:
            if index in self.depth.measured:
                patience = self.timeouts.camera_skew or TRANSFORM_WAIT
                found, depth = self.depth.decode(index, data, patience)
            else:
                found, depth = decode_points(data), _NONE
        except ImageError as error:
            raise ImageError(f"{topic}: {error}") from None
        if index not in self.depth.measured and found.frame_id != frame:
            raise ImageError(f"{topic}: found points in {found.frame_id!r}, expected {frame!r}, robot.base_frame")
        rows, columns, _ = found.points.shape
        height, width, _ = found.points.shape if image is None else image.pixels.shape
        if rows * width != columns * height:
            text = f"{topic}: found {columns}x{rows} points of an image of {width}x{height}: not aligned"
            raise Refused(Reason.CAMERA_INFO_INVALID, f"{text}; set camera.info for both cameras")
        turn = TURNS[self._binding.config.camera.each[index].orientation]
        return found._replace(points=turn(found.points)), turn(depth)

    def _stack(self, index: int, past: Sequence[Past]) -> UInt8Array:
        """Return the images [T, H, W, 3]; images processed for an earlier step are reused."""
        return np.stack([self._image(index, one) for one in past])

    def _image(self, index: int, past: Past) -> UInt8Array:
        key = (index, past.stamp)
        image = self._processed.get(key)
        if image is None:
            assert past.data is not None
            image = self._processed[key] = process(self._preprocessor(past.data, index))
            most = min(_PROCESSED, _BYTES // image.nbytes)
            while len(self._processed) > most:
                self._processed.popitem(last=False)
        return image

    def _state(self, reader: StateReader, now: Past) -> FloatArray:
        deltas = reader.feature.delta_timestamps
        whens = [] if deltas == NOW else [self._when(delta, now.stamp) for delta in deltas]
        pasts = [self._history.at(self._first, when, now) for when in whens] or [now]
        measured = [(Measured(past.inputs.joints, past.inputs.state, past.inputs.arms), past) for past in pasts]
        try:
            vectors = [reader.read(each, past.stamp, self.timeouts.joint_state_age) for each, past in measured]
        except StateError as error:
            raise Refused(Reason.INPUT_MISSING, str(error)) from None
        return vectors[0] if deltas == NOW else np.stack(vectors)

    def _when(self, delta: DeltaTimestamp, stamp: int) -> int:
        return stamp + round(1e9 * self._seconds(delta))

    def _seconds(self, delta: DeltaTimestamp) -> float:
        return delta.seconds or (delta.steps / self._rate if delta.steps else 0.0)

    def _span(self, key: str, deltas: Sequence[DeltaTimestamp]) -> float:
        if not self._rate and any(delta.steps for delta in deltas):
            raise ConfigError(
                f"control.rate_hz: found 0, but '{key}' has past values in steps; set the rate, or give them in "
                "seconds (features.delta_timestamps)"
            )
        return -min(map(self._seconds, deltas))

    def _looks_back(self, camera: int) -> bool:
        return any(
            self._binding.cameras[key] == camera and image.delta_timestamps != NOW
            for key, image in self._images.items()
        )
