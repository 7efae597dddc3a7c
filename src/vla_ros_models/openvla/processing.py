"""Turns action tokens into actions and back, with the conventions of the published OpenVLA code."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import CheckpointError, ConfigError, did_you_mean
from vla_ros.types import FloatArray, IntArray
from vla_ros_models.checkpoint_files import Fields, read_json, read_mask, read_statistics
from vla_ros_models.normalization import Learned

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActionBins:
    """The uniform bins of one action dimension and the tokens that stand for them.

    The last tokens of the unpadded vocabulary are bins in reverse order: token ``vocab_size - 1`` is bin 0, the
    lowest. ``count`` edges make ``count - 1`` bins; a value decodes to the centre of its bin.
    """

    vocab_size: int  # vocabulary *without* padding rows (32000, not 32064)
    count: int = 256  # number of bin edges over [-1, 1] (256)

    @cached_property
    def edges(self) -> FloatArray:
        return _fixed(np.linspace(-1.0, 1.0, self.count))

    @cached_property
    def centers(self) -> FloatArray:
        edges = self.edges
        return _fixed((edges[:-1] + edges[1:]) / 2.0)

    def indices(self, tokens: ArrayLike) -> IntArray:
        """Return the bin of each token, int64; tokens outside the bins are clipped to the nearest bin."""
        raw = self.vocab_size - np.asarray(tokens, dtype=np.int64) - 1
        indices: IntArray = np.minimum(np.maximum(raw, 0), self.count - 2)  # a third of np.clip's time for 7 tokens
        return indices

    def decode(self, tokens: ArrayLike) -> FloatArray:
        """Return the normalised values of ``tokens``, float64 of the same shape, in (-1, 1)."""
        return self.centers[self.indices(tokens)]

    def encode(self, normalized: ArrayLike) -> IntArray:
        """Return the tokens of normalised values (clipped to [-1, 1]), int64, as used in training."""
        clipped = np.clip(np.asarray(normalized, dtype=np.float64), -1.0, 1.0)
        return self.vocab_size - np.digitize(clipped, self.edges).astype(np.int64)

    def outside(self, tokens: ArrayLike) -> int:
        """Count tokens outside the bins, a sign of a damaged or wrong checkpoint."""
        raw = self.vocab_size - np.asarray(tokens, dtype=np.int64) - 1
        return int(np.count_nonzero((raw < 0) | (raw >= self.count)))


@dataclass(frozen=True)
class ActionStatistics:
    """Bounds with which the actions of one dataset were normalised."""

    key: str  # the dataset's name (``unnorm_key``)
    low: FloatArray  # float64 [D], the 1st percentile (or minimum), in the action's units
    high: FloatArray  # float64 [D], the 99th percentile (or maximum)
    mask: NDArray[np.bool_]  # bool [D]; False entries are not normalised (the gripper of most datasets)
    margin: float = 0.0  # added to the width of every range; OpenVLA-OFT uses 1e-8

    @property
    def dimension(self) -> int:
        """D, the number of values that the statistics describe; for OpenVLA, also of tokens to decode."""
        return int(self.low.shape[0])

    @property
    def middle(self) -> tuple[float, ...]:
        """Middle of the bounds [D]."""
        return tuple(map(float, (self.low + self.high) / 2))

    def learned(self, names: tuple[str, str]) -> Learned:
        """Return the bounds, which have these names in the file."""
        return Learned((names,) * self.dimension, self.low, self.high, self.mask)

    def unnormalize(self, normalized: FloatArray) -> FloatArray:
        """Convert actions to the dataset's units, float64 [..., D]; masked-out entries are unchanged."""
        scaled = 0.5 * (normalized + 1.0) * (self.high - self.low + self.margin) + self.low
        return np.where(self.mask, scaled, normalized)

    def normalize(self, actions: FloatArray) -> FloatArray:
        """Undo :meth:`unnormalize`; normalised entries are clipped to [-1, 1]."""
        width = self.high - self.low + self.margin
        scaled = 2.0 * (actions - self.low) / np.where(width > 0, width, 1.0) - 1.0
        return np.where(self.mask, np.clip(scaled, -1.0, 1.0), actions)


QUANTILES = ("q01", "q99")


class DatasetStatistics(Mapping[str, ActionStatistics]):
    """Each dataset's statistics by name; a damaged entry raises CheckpointError when it is used, not before."""

    def __init__(self, raw: Mapping[str, Any], parse: Callable[[str, Any], ActionStatistics]) -> None:
        self._raw, self._parse = raw, parse

    def __getitem__(self, key: str) -> ActionStatistics:
        return self._parse(key, self._raw[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def readable(self) -> dict[str, ActionStatistics]:
        """Return the entries that are not damaged."""
        found = {}
        for key in self:
            with contextlib.suppress(CheckpointError):
                found[key] = self[key]
        return found


def read_dataset_statistics(
    folder: Path, group: str = "action", bounds: tuple[str, str] = QUANTILES, margin: float = 0.0
) -> DatasetStatistics:
    """Read each dataset's statistics from ``dataset_statistics.json``, else from ``config.json``.

    In a fine-tuned checkpoint, the latter has those of the base model. ``group`` is ``action``, or ``proprio`` for
    the state; ``bounds`` names the lower and the upper bounds. Raises CheckpointError if there are no statistics.
    """
    path = folder / "dataset_statistics.json"
    if path.exists():
        raw = read_json(path)
        _warn_of_others(raw, folder / "config.json", group, bounds)
    else:
        path = folder / "config.json"
        raw = read_json(path).get("norm_stats") or {}
    if not raw:
        raise CheckpointError(
            f"{folder}: no action statistics; expected dataset_statistics.json or norm_stats in config.json"
        )
    if isinstance(own := raw.get(group), dict) and "mean" in own:
        raise CheckpointError(
            f"{path}: found the statistics of one dataset without its name, as in Octo's checkpoints, expected "
            f"{{dataset: {{'{group}': ...}}}} as in OpenVLA's; take the file of this checkpoint's training run"
        )
    return DatasetStatistics(raw, partial(_parse, path=path, group=group, bounds=bounds, margin=margin))


def _warn_of_others(raw: Mapping[str, Any], config: Path, group: str, bounds: tuple[str, str]) -> None:
    """Warn of data sets for which ``config.json`` states other bounds."""
    stated = read_json(config).get("norm_stats") if config.exists() else {}
    if not isinstance(stated, dict):
        return
    for key, entry in raw.items():
        mine, theirs = (each.get(group) if isinstance(each, dict) else None for each in (entry, stated.get(key)))
        if not isinstance(mine, dict) or not isinstance(theirs, dict):
            continue
        for name in (*bounds, "mask"):
            if mine.get(name) != theirs.get(name, mine.get(name)):
                text = "%s: %s of '%s' differs from dataset_statistics.json, whose value is used"
                logger.warning(text, config, name, key)


def choose(statistics: Mapping[str, ActionStatistics], key: str) -> ActionStatistics:
    """Return the statistics of dataset ``key``, which may be empty if the checkpoint has only one.

    A LIBERO suite's plain name also selects ``{suite}_no_noops``, the filtered dataset used in training.
    """
    names = sorted(statistics)
    if not key:
        if len(names) == 1:
            return statistics[names[0]]
        raise ConfigError(
            f"policy.unnorm_key: not set, but the checkpoint was trained on {len(names)} datasets; "
            f"name the one that matches the robot: {names}"
        )
    if key in statistics:
        return statistics[key]
    fallback = f"{key}_no_noops"
    if fallback in statistics:
        logger.info("policy.unnorm_key: %s is not in the checkpoint, using %s", key, fallback)
        return statistics[fallback]
    hint = did_you_mean(key, names)
    raise ConfigError(f"policy.unnorm_key: the checkpoint has no dataset '{key}'; it has {names}{hint}")


def _fixed(array: FloatArray) -> FloatArray:
    """Make a shared array read-only."""
    array.flags.writeable = False
    return array


def _parse(
    key: str, entry: Any, path: Path, group: str, bounds: tuple[str, str], margin: float
) -> ActionStatistics:
    whole, where = Fields(entry, f"{path}: '{key}'"), f"{path}: {group} of '{key}'"
    whole.finish({"read where they are needed": "action proprio", "sizes of the data": "num_*"})
    found = whole.get(group, {})
    low, high = read_statistics(found, bounds, where)
    fields = Fields(found, where, "the published code does not read it, but training may have used it")
    mask = read_mask(fields.get("mask", [True] * low.size), f"{where}: mask")
    fields.finish({"statistics of the same data": "mean std min max q* num_*"})
    if mask.shape != low.shape:
        raise CheckpointError(f"{where}: mask has the shape {mask.shape}, but the bounds have {low.shape}")
    return ActionStatistics(key, low, high, mask, margin)


def with_declared_gripper(actions: FloatArray, spec: PolicySpec) -> FloatArray:
    """Scale the gripper of actions [K, D], 0 closed to 1 open, to the range in ``spec``."""
    column = spec.gripper
    if column is None or (ends := spec.action[-1].range) is None:
        return actions
    actions = actions.copy()
    actions[:, column] = ends[0] + actions[:, column] * (ends[1] - ends[0])
    return actions
