"""The section ``record``: what a recorder beside the node writes."""

from dataclasses import dataclass

from vla_ros.config.options import option


@dataclass(frozen=True)
class RecordConfig:
    """What a recorder in a process of its own writes; see docs/recording.md."""

    what: str = option(
        "none",
        "none: no recorder; all: from its start; episodes: while the arm is armed; corrections: while a person "
        "moves the arm; last: the last record.seconds and what follows, when its service ~/record is called",
        choices=("none", "all", "episodes", "corrections", "last"),
    )
    folder: str = option("recordings", "Folder in which each recording is a rosbag2 bag (MCAP) of its own")
    seconds: float = option(10.0, "With last: how long messages are kept in memory", "s", 0.1, 3600)
    memory: int = option(
        1024, "Messages kept in memory at most; with last, the oldest are forgotten", "MiB", 16, 65536
    )
