"""Reads a LeRobotDataset v3.0 as episodes, without LeRobot: its parquet files, and its images or videos.

The layout follows LeRobot 0.6.1. Images in a data set are upright, and its numbers are in the policy's units
already; orientations of the configuration are not applied.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vla_ros.config import Config
from vla_ros.contract.binding import Binding
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.types import FloatArray, IntArray, UInt8Array
from vla_ros.vision.decode import decode_compressed
from vla_ros.vision.messages import encode_compressed, encode_image
from vla_ros_lab.replay.storage import Record
from vla_ros_lab.training.bags import Messages
from vla_ros_lab.training.episodes import DataError, EpisodeSamples, ReadOptions, RecordedEpisode, seeing

INFO = "meta/info.json"
_IMAGES, _STATE, _ACTION = "observation.images.", "observation.state", "action"
_CORRECTED, _SUCCESS = "intervention", "next.success"
_OPEN = 16  # video files that are open at once
_SECOND = 1_000_000_000


class Frames:
    """The images of a data set by their number; files stay open in the process that reads them."""

    def __init__(self, times: FloatArray, rate: float) -> None:
        self._stamps = np.round(times * _SECOND).astype(np.int64) + _SECOND  # 0 would be no stamp
        self._rate = rate
        self._files: list[str] = []
        # Of each camera: file [N] and time [N] in it of its videos' frames, or else its encoded images.
        self._cameras: list[tuple[IntArray, FloatArray] | Messages] = []
        self._videos: OrderedDict[str, _Video] = OrderedDict()
        self._process, self._inherited = os.getpid(), [self._videos]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_videos": OrderedDict(), "_process": 0, "_inherited": []}

    def add_videos(self, files: Sequence[Path], numbers: IntArray, times: FloatArray) -> None:
        """Add a camera of N frames: frame n is at ``times[n]``, in seconds, in ``files[numbers[n]]``."""
        self._cameras.append((numbers + len(self._files), times))
        self._files += map(str, files)

    def add_images(self, encoded: Iterator[bytes]) -> None:
        """Add a camera whose images are PNG or JPEG files."""
        messages = Messages(1)
        for row, data in enumerate(encoded):
            messages.add(0, Record(0, "", encode_compressed(data, self.stamp(0, row), "", "png")), 0, Path())
        messages.finish()
        self._cameras.append(messages)

    def stamp(self, camera: int, row: int) -> int:
        return int(self._stamps[row])

    def message(self, camera: int, row: int) -> bytes:
        source = self._cameras[camera]
        if isinstance(source, Messages):
            image = decode_compressed(source.message(0, row)).image
        else:
            image = self._video(self._files[source[0][row]]).at(float(source[1][row]))
        return encode_image(image, self.stamp(camera, row), "")

    def _video(self, path: str) -> _Video:
        if self._process != os.getpid():  # in a forked worker, whose parent's decoders wait for threads it has not
            self._process, self._videos = os.getpid(), OrderedDict()
        if path not in self._videos:
            if len(self._videos) >= _OPEN:
                self._videos.popitem(last=False)[1].close()
            self._videos[path] = _Video(path, self._rate)
        self._videos.move_to_end(path)
        return self._videos[path]


class _Video:
    """An open video file; frames that follow each other are read without seeking."""

    def __init__(self, path: str, rate: float) -> None:
        self._path, self._half = path, 0.5 / rate
        try:
            self._container = av.open(path)
            self._stream = self._container.streams.video[0]
        except (OSError, IndexError, av.error.FFmpegError) as error:
            raise DataError(f"{path}: cannot be read as a video ({error}); copy the data set again") from None
        self._stream.codec_context.thread_count = 1  # workers are processes
        self._next: Iterator[Any] = iter(())
        self._last = -1.0  # time of the last frame, s

    def close(self) -> None:
        self._container.close()

    def at(self, time: float) -> UInt8Array:
        """Return the frame at ``time`` seconds, uint8 [H, W, 3] RGB."""
        unit = float(self._stream.time_base or 0)
        try:
            if not 0 < time - self._last < 5 * self._half:
                self._container.seek(max(0, round((time - self._half) / unit)), stream=self._stream)
                self._next = self._container.decode(self._stream)
            for frame in self._next:
                self._last = (frame.pts or 0) * unit
                if self._last > time - self._half:
                    if self._last > time + self._half:
                        break
                    return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
        except av.error.FFmpegError as error:
            raise DataError(f"{self._path}: damaged at {time:.3f} s ({error}); copy the data set again") from None
        raise DataError(f"{self._path}: has no frame at {time:.3f} s; copy the data set again")


def open_set(root: Path, spec: PolicySpec, config: Config, options: ReadOptions) -> EpisodeSamples:
    """Open a data set. For errors, see :mod:`.reading`."""
    return _Set(root, config).open(spec, options)


class _Set:
    """A data set's description and its numbers."""

    def __init__(self, root: Path, config: Config) -> None:
        self._root, self._config = root, config
        try:
            self._info = json.loads((root / INFO).read_text(encoding="utf-8"))
            version, self._features = str(self._info["codebase_version"]), dict(self._info["features"])
            self.rate = float(self._info["fps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{root / INFO}: not the description of a LeRobot data set ({error!r})") from None
        if not version.startswith("v3."):
            raise DataError(
                f"{root}: found LeRobotDataset {version}, expected v3.0; convert it with "
                "python -m lerobot.scripts.convert_dataset_v21_to_v30 (of LeRobot)"
            )
        kinds = {key: one.get("dtype") for key, one in self._features.items()}
        self.cameras = {
            key: kind
            for key, kind in kinds.items()
            if kind in ("video", "image") and not (self._features[key].get("info") or {}).get("is_depth_map")
        }
        self._table = self._read("data", [key for key, kind in kinds.items() if kind not in ("video", "image")])
        self.notes, self.remarks = Counter[str](), tuple[str, ...]()

    def open(self, spec: PolicySpec, options: ReadOptions) -> EpisodeSamples:
        spec = complete_spec(spec, self._config)
        if placed := [f"'{key}' of '{image}'" for image, key in (*spec.points, *spec.depth)]:
            raise DataError(
                f"{self._root}: the policy takes points or depth ({', '.join(placed)}), and a LeRobot data set "
                "lacks what they are computed from, each camera's CameraInfo and pose; train on the bags"
            )
        cameras = self._paired(spec.images)
        state, actions = self._states(spec.state), self._vector(_ACTION)
        if spec.dimension and actions.shape[1] != spec.dimension:
            raise DataError(
                f"{self._root}: the actions have {actions.shape[1]} numbers, but those of the policy have "
                f"{spec.dimension}; export the bags with --action, or train another policy"
            )
        spec = replace(spec, dimension=actions.shape[1])
        frames = Frames(self._vector("timestamp")[:, 0], self.rate)
        keys = list(dict.fromkeys(cameras.values()))
        for key in keys:
            self._add_camera(frames, key)
        indices = {image: keys.index(key) for image, key in cameras.items()}
        binding = Binding(spec, indices, (), (), (), self._upright(keys))
        names = {"state": self._names(_STATE, state), "action": self._names(_ACTION, {_ACTION: actions})}
        found = list(self._episodes(state, actions, len(keys), spec, options))
        notes = +self.notes, self.remarks
        return EpisodeSamples(seeing(binding), found, frames, self.rate, names, options.whole_chunks, *notes)

    def _read(self, folder: str, columns: Sequence[str] | None) -> pa.Table:
        paths = sorted((self._root / folder).glob("*/*.parquet"))
        if not paths:
            raise DataError(f"{self._root / folder}: found no parquet files, expected those of LeRobotDataset v3.0")
        try:
            return pa.concat_tables(
                [pq.read_table(path, columns=columns) for path in paths], promote_options="default"
            )
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._root / folder}: cannot be read ({error}); copy the data set again") from None

    def _column(self, name: str) -> IntArray:
        """Return a column of single whole numbers [N]."""
        return self._vector(name)[:, 0].astype(np.int64)

    def _vector(self, name: str) -> FloatArray:
        """Return a column of vectors [N, D]."""
        if name not in self._table.column_names:
            raise DataError(f"{self._root}: has no column {name}; it has {', '.join(self._table.column_names)}")
        column, count = self._table[name].combine_chunks(), len(self._table)
        flat = column.flatten() if pa.types.is_nested(column.type) else column
        if not count or len(flat) % count:
            raise DataError(
                f"{self._root}: {name} has {len(flat)} numbers in {count} frames, not equally many in each"
            )
        return np.asarray(flat.to_numpy(zero_copy_only=False), np.float64).reshape(count, -1)

    def _paired(self, images: Sequence[ImageFeature]) -> dict[str, str]:
        """Return the data set's camera of each of the policy's images."""
        found = {}
        for image in images:
            names = (image.source, f"{_IMAGES}{image.source}", f"observation.{image.source}", image.key)
            key = next((name for name in names if name in self.cameras), "")
            if not key and not image.camera and len(self.cameras) == len(images) == 1:
                [key] = self.cameras
                self.remarks += (f"the policy's image '{image.key}' is taken from '{key}', the only camera",)
            if key:
                found[image.key] = key
            elif image.required:
                named = f" '{image.camera}' (features.images)" if image.camera else ""
                raise DataError(
                    f"{self._root}: has no camera{named} for the policy's image '{image.key}'; it has "
                    f"{', '.join(self.cameras) or 'none'}; name one with "
                    f"-p features.images:='[\"{image.key} = CAMERA\"]'"
                )
        if not found:
            wanted, has = ", ".join(image.key for image in images), ", ".join(self.cameras) or "no cameras"
            raise DataError(
                f"{self._root}: has {has}, but the policy takes {wanted}; name them with features.images"
            )
        return found

    def _states(self, features: Sequence[StateFeature]) -> dict[str, FloatArray]:
        """Return the policy's state vectors [N, D] of all frames."""
        found = {}
        for one in features:
            key = next((name for name in (one.key, f"observation.{one.key}") if name in self._features), "")
            if key:
                found[one.key] = self._vector(key)
        if features and not found:  # the policy's vectors in turn
            whole, sizes = self._vector(_STATE), [one.size for one in features]
            ends = np.cumsum(sizes)[:-1]
            found = dict(zip((one.key for one in features), np.split(whole, ends, axis=1), strict=True))
        for one in features:
            numbers = found[one.key].shape[1] if one.key in found else 0
            if not numbers or (one.size and numbers != one.size):
                raise DataError(
                    f"{self._root}: found {numbers} numbers for the policy's state '{one.key}', expected "
                    f"{one.size}; export the bags with --state, or train another policy"
                )
        return found

    def _names(self, feature: str, vectors: Mapping[str, FloatArray]) -> list[str]:
        """Return the names of the numbers of ``vectors``: those of ``feature``, if they are as many."""
        count = sum(values.shape[1] for values in vectors.values())
        stated = self._features.get(feature, {}).get("names") or []
        lists = stated.values() if isinstance(stated, dict) else [stated]
        names = [str(name) for one in lists for name in one]
        numbered = [f"{key} {index}" for key, one in vectors.items() for index in range(one.shape[1])]
        return names if len(names) == count else numbered

    def _add_camera(self, frames: Frames, key: str) -> None:
        if self.cameras[key] == "image":
            frames.add_images(self._encoded(key))
            return
        prefix = f"videos/{key}"
        columns = [
            "episode_index",
            *(f"{prefix}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")),
        ]
        rows = self._read("meta/episodes", columns).to_pydict()
        files = dict.fromkeys(zip(rows[columns[1]], rows[columns[2]], strict=True))
        paths = [
            self._root / str(self._info["video_path"]).format(video_key=key, chunk_index=chunk, file_index=file)
            for chunk, file in files
        ]
        if absent := [path for path in paths if not path.is_file()]:
            raise DataError(f"{absent[0]}: does not exist; copy the data set again")
        places = {place: number for number, place in enumerate(files)}
        numbers = [places[place] for place in zip(rows[columns[1]], rows[columns[2]], strict=True)]
        of = {episode: row for row, episode in enumerate(rows[columns[0]])}
        index = self._column("episode_index")
        if unknown := set(np.unique(index).tolist()) - of.keys():
            raise DataError(f"{self._root}/meta/episodes: has no episode {min(unknown)}; copy the data set again")
        each = np.array([of[episode] for episode in index.tolist()], np.int64)
        begins = np.array(rows[columns[3]], np.float64)[each]
        frames.add_videos(
            paths, np.array(numbers, np.int64)[each], begins + self._column("frame_index") / self.rate
        )

    def _encoded(self, key: str) -> Iterator[bytes]:
        for path in sorted((self._root / "data").glob("*/*.parquet")):
            for batch in pq.ParquetFile(path).iter_batches(64, columns=[key]):
                for cell in batch.column(0).to_pylist():
                    yield cell["bytes"] or (self._root / cell["path"]).read_bytes()

    def _upright(self, keys: Sequence[str]) -> Config:
        """Return the options with the data set's cameras."""
        camera = replace(
            self._config.camera,
            topics=tuple(keys),
            keys=tuple(keys),
            orientation=("none",) * len(keys),
            transport="raw",
        )
        return replace(self._config, camera=camera)

    def _tasks(self) -> Mapping[int, str]:
        path = self._root / "meta/tasks.parquet"
        try:
            table = pq.read_table(path).to_pydict()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: cannot be read ({error}); copy the data set again") from None
        texts = table.get("task") or table.get("__index_level_0__") or []
        return dict(zip(table["task_index"], map(str, texts), strict=True))

    def _episodes(
        self,
        state: Mapping[str, FloatArray],
        actions: FloatArray,
        cameras: int,
        spec: PolicySpec,
        options: ReadOptions,
    ) -> Iterator[RecordedEpisode]:
        tasks, numbers = self._tasks(), self._column("episode_index")
        task = self._column("task_index")
        corrected = self._flags(_CORRECTED)
        succeeded = self._flags(_SUCCESS)
        every = np.concatenate([actions, *state.values()], axis=1)
        finite = np.asarray(np.isfinite(every).all(axis=1))
        self.notes["frames with NaN or infinite numbers"] = int((~finite).sum())
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for begin, end in pairwise(edges):
            rows = np.arange(begin, end)
            success, taught = bool(succeeded[rows].any()), bool(corrected[rows].any())
            if succeeded.any() and not (success or taught or options.failures):
                self.notes["episodes without success"] += 1
                continue
            usable = np.asarray(finite[rows] & corrected[rows] if taught else finite[rows])
            for run in np.split(rows, np.flatnonzero(~usable)):
                kept = run[usable[run - begin]]
                if len(kept):
                    yield RecordedEpisode(
                        f"{self._root}, episode {numbers[begin]}",
                        options.instruction or tasks.get(int(task[kept[0]]), ""),
                        actions[kept],
                        {one.key: _past(state[one.key][kept], one, self.rate) for one in spec.state},
                        np.tile(kept, (cameras, 1)),
                        "success" if success else "",
                        taught,
                    )

    def _flags(self, name: str) -> NDArray[np.bool_]:
        known = name in self._table.column_names
        return self._vector(name).astype(bool)[:, 0] if known else np.zeros(len(self._table), np.bool_)


def _past(values: FloatArray, feature: StateFeature, rate: float) -> FloatArray:
    """Return vectors [T, N], or [T, P, N] at the feature's times; an episode's first stands for those before."""
    steps = [one.steps or round(one.seconds * rate) for one in feature.delta_timestamps]
    if steps == [0]:
        return values
    at = np.arange(len(values))[:, None] + np.array(steps)
    past: FloatArray = values[np.maximum(at, 0)]
    return past
