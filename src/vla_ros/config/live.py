"""The options that are in force, shared by everything that reads options which may change while the node runs."""

from __future__ import annotations

from vla_ros.config.tree import Config


class LiveConfig:
    """Holds the present tree of options. One thread replaces it, any thread reads it.

    Read :attr:`current` once at the beginning of a step and use that value throughout: a tree never changes, so
    no step sees half of a change.

    Attributes:
        current: The options in force.
    """

    def __init__(self, config: Config) -> None:
        self.current = config
