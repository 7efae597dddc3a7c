"""Opens bags or a LeRobot data set as samples."""

from collections.abc import Sequence
from pathlib import Path

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros_lab.training import bags, lerobot
from vla_ros_lab.training.episodes import DataError, EpisodeSamples, ReadOptions


def open_samples(
    paths: Sequence[Path], spec: PolicySpec, config: Config, options: ReadOptions | None = None
) -> EpisodeSamples:
    """Open bags (or folders of bags) or one LeRobot v3 data set for a policy.

    ``spec`` is from :meth:`~vla_ros.policies.base.Policy.describe`.

    Raises:
        DataError: There is no episode, or nothing can be read.
        ConfigError: Data, policy and options do not fit together.
    """
    options = options or ReadOptions()
    sets = [path for path in paths if (path / lerobot.INFO).is_file()]
    if sets and len(paths) > 1:
        raise DataError(f"{sets[0]}: a LeRobot data set, beside others; expected one data set, or bags")
    read = (
        lerobot.open_set(sets[0], spec, config, options) if sets else bags.open_bags(paths, spec, config, options)
    )
    if not len(read):
        listed = "".join(f"\n  left out: {what} ({count})" for what, count in read.notes.most_common() if count)
        raise DataError(f"{', '.join(map(str, paths))}: no episode to train on{listed}")
    return read
