"""Writes a LeRobotDataset v3.0: first each episode, then the assembled data set.

Finished episodes are stored in ``OUTPUT.partial``, and an interrupted export resumes after the last one. The data
set is assembled there and then renamed, so a data set under its final name is always complete. The format
follows LeRobot 0.6.1's source and a data set written by it.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vla_ros.errors import VlaRosError
from vla_ros_lab.export.statistics import ImageStatistics, of_vectors, over_episodes, sampled
from vla_ros_lab.report import video

VERSION = "v3.0"
_FILES_PER_CHUNK = 1000
_DATA_MB, _VIDEO_MB = 100, 200  # maximum size of a file
_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
_COUNTERS = ("frame_index", "episode_index", "index", "task_index")


class ExportError(VlaRosError):
    """A data set cannot be written, or a bag cannot become a part of it."""


class OutputError(ExportError):
    """A data set cannot be written, whatever the bag is."""


@dataclass(frozen=True)
class Schema:
    """Properties that all episodes of a data set share."""

    rate: int  # frames per second
    robot: str
    vectors: Mapping[str, tuple[str, ...]]  # feature to the names of its numbers; one number has none
    videos: Mapping[str, tuple[int, int]]  # feature to the (height, width) of its images
    crf: int = 20  # the encoder's constant rate factor; lower means better quality and larger files
    flags: tuple[str, ...] = ()  # features of one truth value
    depths: tuple[str, ...] = ()  # features of ``videos`` that are depth
    command: tuple[str, ...] = ()  # bags and options; an export can be resumed only with the same bags and options


class DatasetWriter:
    """Writes one data set, or resumes writing it.

    Raises OutputError if ``output`` exists, or if an export with another schema was begun there.
    """

    def __init__(self, output: Path, schema: Schema) -> None:
        self._output, self._schema = output, schema
        self._partial = output.with_name(output.name + ".partial")
        if output.exists():
            raise OutputError(f"{output}: exists; name another folder or remove it")
        self._partial.mkdir(parents=True, exist_ok=True)
        begun, ours = self._partial / "schema.json", json.dumps(asdict(schema), indent=1)
        finished = any(self._partial.glob("*/episode.json"))
        if finished and begun.read_text(encoding="utf-8") != ours:
            found = f"{self._partial}: an export with other options was begun here"
            raise OutputError(f"{found}; repeat its command or add --restart")
        begun.write_text(ours, encoding="utf-8")

    def has(self, name: str) -> bool:
        return (self._partial / name / "episode.json").exists()

    def add(
        self,
        name: str,
        task: str,
        vectors: Mapping[str, NDArray[Any]],
        images: Mapping[str, Iterable[NDArray[Any]]],
    ) -> None:
        """Write one episode of T frames.

        Episodes are sorted by ``name``, which must be unique. ``vectors`` maps keys to arrays [T, N]; ``images``
        maps keys to T images, uint8 [H, W, 3] RGB, or depth, uint16 [H, W] in millimetres, which are read once.
        Flags are bool [T, 1].
        """
        folder = self._partial / f"{name}.part"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        length = len(next(iter(vectors.values())))
        flags = self._schema.flags
        columns = {key: values.astype(bool if key in flags else "f4") for key, values in vectors.items()}
        statistics = {key: of_vectors(values.astype("f4")) for key, values in columns.items()}
        for key, size in self._schema.videos.items():
            depth = key in self._schema.depths
            counted = ImageStatistics(depth=depth)
            checked = _counting(images[key], key, size if depth else (*size, 3), counted, sampled(length))
            checked = map(video.encode_depth, checked) if depth else checked
            frames = video.encode(folder / f"{key}.mp4", checked, self._schema.rate, self._schema.crf)
            if frames != length:
                raise ExportError(f"{name}: {frames} images of {key}, expected {length}")
            statistics[key] = counted.result()
        pq.write_table(pa.table(_map(_column, columns)), folder / "data.parquet")
        stats = {key: _map(np.ndarray.tolist, one) for key, one in statistics.items()}
        episode = {"task": task, "length": length, "stats": stats}
        (folder / "episode.json").write_text(json.dumps(episode), encoding="utf-8")
        folder.rename(self._partial / name)

    def finish(self) -> int:
        """Assemble the data set and return its number of episodes.

        Raises ExportError if there are no episodes.
        """
        finished = sorted(path.parent for path in self._partial.glob("*/episode.json"))
        folders = [folder for folder in finished if folder.suffix != ".part"]
        if not folders:
            raise ExportError(f"{self._output}: there are no episodes to export")
        whole = self._partial / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        _Assembly(self._schema, whole, folders).write()
        whole.rename(self._output)
        shutil.rmtree(self._partial)
        return len(folders)


def _counting(
    images: Iterable[NDArray[Any]],
    key: str,
    size: tuple[int, ...],
    statistics: ImageStatistics,
    chosen: frozenset[int],
) -> Iterator[NDArray[Any]]:
    """Yield the images, checking their size and adding sampled images to the statistics."""
    for index, image in enumerate(images):
        if image.shape != size:
            found, expected = ("x".join(map(str, shape[1::-1])) for shape in (image.shape, size))
            raise ExportError(f"{key}: found an image of {found}, expected {expected}")
        if index in chosen:
            statistics.add(image)
        yield image


def _column(values: NDArray[Any]) -> pa.Array:
    """Convert [T, N] to a column of lists, or of single values if N is 1, as LeRobot expects."""
    flat = pa.array(values.ravel())
    return flat if values.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _map(function: Callable[[Any], Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: function(value) for name, value in entries.items()}


class _Assembly:
    """Assembles one data set from its finished episodes."""

    def __init__(self, schema: Schema, root: Path, folders: list[Path]) -> None:
        self._schema, self._root, self._folders = schema, root, folders
        self._episodes = [json.loads((folder / "episode.json").read_text(encoding="utf-8")) for folder in folders]
        self._lengths = [int(episode["length"]) for episode in self._episodes]
        self._starts = [0, *np.cumsum(self._lengths).tolist()]
        self._tasks = list(dict.fromkeys(episode["task"] for episode in self._episodes))
        self._rows: list[dict[str, Any]] = []

    def write(self) -> None:
        (self._root / "meta/episodes/chunk-000").mkdir(parents=True)
        statistics = []
        for index, episode in enumerate(self._episodes):
            row = {"episode_index": index, "tasks": [episode["task"]], "length": self._lengths[index]}
            row |= {"dataset_from_index": self._starts[index], "dataset_to_index": self._starts[index + 1]}
            self._rows.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
            counters = self._counters(index).items()
            own = {key: _map(np.asarray, one) for key, one in episode["stats"].items()}
            statistics.append(own | {key: of_vectors(column[:, None]) for key, column in counters})
        self._data()
        for key in self._schema.videos:
            self._video(key)
        for row, own in zip(self._rows, statistics, strict=True):
            row |= {f"stats/{key}/{name}": each.tolist() for key, one in own.items() for name, each in one.items()}
        pq.write_table(pa.Table.from_pylist(self._rows), self._root / _EPISODES)
        wholes = {key: over_episodes([own[key] for own in statistics]) for key in statistics[0]}
        total = {key: _map(np.ndarray.tolist, whole) for key, whole in wholes.items()}
        (self._root / "meta/stats.json").write_text(json.dumps(total, indent=4), encoding="utf-8")
        pq.write_table(self._task_table(), self._root / "meta/tasks.parquet")
        (self._root / "meta/info.json").write_text(json.dumps(self._info(), indent=4), encoding="utf-8")

    def _counters(self, index: int) -> dict[str, Any]:
        frames = np.arange(self._lengths[index])
        task = self._tasks.index(self._episodes[index]["task"])
        times = {"timestamp": frames / self._schema.rate, "frame_index": frames}
        numbers = {"episode_index": np.full_like(frames, index), "index": self._starts[index] + frames}
        return {**times, **numbers, "task_index": np.full_like(frames, task)}

    def _files(self, prefix: str, source: str, path: str, largest_mb: int) -> Iterator[tuple[Path, list[int]]]:
        """Group the episodes' files named ``source`` into larger files of the data set.

        Yields the path of each file and the indices of its episodes, as many as fit but at least one. Records the
        number of the file in the rows of these episodes.
        """
        files: list[list[int]] = []
        room = -1.0
        for index, folder in enumerate(self._folders):
            size = (folder / source).stat().st_size
            if size > room:
                files.append([])
                room = largest_mb * 2**20
            files[-1].append(index)
            room -= size
        for number, members in enumerate(files):
            place = {"chunk_index": number // _FILES_PER_CHUNK, "file_index": number % _FILES_PER_CHUNK}
            for index in members:
                self._rows[index] |= {f"{prefix}/{name}": value for name, value in place.items()}
            target = self._root / path.format(**place, video_key=prefix.removeprefix("videos/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            yield target, members

    def _data(self) -> None:
        for path, members in self._files("data", "data.parquet", _DATA, _DATA_MB):
            tables = []
            for index in members:
                table = pq.read_table(self._folders[index] / "data.parquet")
                for key, column in self._counters(index).items():
                    table = table.append_column(key, pa.array(column, pa.float32() if key == "timestamp" else None))
                tables.append(table)
            pq.write_table(pa.concat_tables(tables), path)

    def _video(self, key: str) -> None:
        prefix, source, rate = f"videos/{key}", f"{key}.mp4", self._schema.rate
        for path, members in self._files(prefix, source, _VIDEO, _VIDEO_MB):
            lengths = [self._lengths[index] for index in members]
            video.concatenate([self._folders[index] / source for index in members], path, lengths, rate)
            edges = [0, *np.cumsum(lengths).tolist()]
            for index, (begin, end) in zip(members, pairwise(edges), strict=True):
                times = {"from_timestamp": begin / rate, "to_timestamp": end / rate}
                self._rows[index] |= {f"{prefix}/{name}": time for name, time in times.items()}

    def _task_table(self) -> pa.Table:
        """Return the tasks; metadata for pandas make their texts the index, as LeRobot expects."""
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ]
        pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
        table = pa.table({"task_index": list(range(len(self._tasks))), "task": self._tasks})
        return table.replace_schema_metadata({"pandas": json.dumps(pandas)})

    def _info(self) -> dict[str, Any]:
        schema = self._schema
        features: dict[str, Any] = {
            key: {"dtype": "float32", "shape": [len(names) or 1], "names": list(names) or None}
            for key, names in schema.vectors.items()
        }
        features |= {key: {"dtype": "bool", "shape": [1], "names": None} for key in schema.flags}
        for key, (height, width) in schema.videos.items():
            depth, channels = key in schema.depths, 1 if key in schema.depths else 3
            about = {"height": height, "width": width, "codec": "h264", "channels": channels, "fps": schema.rate}
            about |= {"pix_fmt": video.pixel_format(height, width), "crf": schema.crf}
            if depth:
                about |= {"codec": "hevc", "pix_fmt": "gray12le", "crf": None, **video.DEPTH}
            info = {f"video.{name}": value for name, value in about.items()}
            info |= {"has_audio": False, "is_depth_map": depth, **({"depth_unit": "mm"} if depth else {})}
            shape = {"shape": [height, width, channels], "names": ["height", "width", "channels"]}
            features[key] = {"dtype": "video", **shape, "info": info}
        features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
        features |= {key: {"dtype": "int64", "shape": [1], "names": None} for key in _COUNTERS}
        count = len(self._episodes)
        totals = {"total_episodes": count, "total_frames": self._starts[-1], "total_tasks": len(self._tasks)}
        sizes = {"chunks_size": _FILES_PER_CHUNK, "data_files_size_in_mb": _DATA_MB}
        return {
            "codebase_version": VERSION,
            "fps": schema.rate,
            "features": features,
            **totals,
            **sizes,
            "video_files_size_in_mb": _VIDEO_MB,
            "data_path": _DATA,
            "video_path": _VIDEO if schema.videos else None,
            "robot_type": schema.robot,
            "splits": {"train": f"0:{count}"},
        }
