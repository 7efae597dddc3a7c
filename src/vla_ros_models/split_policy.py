"""Base class of policies whose network can be split over the GPUs of a host (``policy.gpus``)."""

from dataclasses import replace
from typing import Any

import torch

from vla_ros.config import Config
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Progress, no_progress
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.network_policy import L, NetworkPolicy, Placement, R, S
from vla_ros_models.ranks import LeadingRank, describe
from vla_ros_models.splitting import Shard


class SplitPolicy(NetworkPolicy[L, S, R]):
    """A network policy whose options have ``gpus``; subclasses load their shard and call :meth:`_lead` before."""

    _options: Any

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config, self._rank = config, 0
        self._ranks: Ranks | None = None  # None before loading, and on one GPU

    def join(self, ranks: Ranks) -> None:
        """Become one of the other ranks of ``policy.gpus``: :meth:`load` then obeys rank 0."""
        self._rank, self._ranks = ranks.rank, ranks

    @property
    def ranks(self) -> list[int]:
        """Process ids of the other ranks; empty on one GPU and before loading."""
        return self._ranks.pids if isinstance(self._ranks, LeadingRank) else []

    def load(self, progress: Progress = no_progress) -> None:
        super().load(progress)
        if isinstance(self._ranks, LeadingRank):
            self._ranks.begin()

    def close(self) -> None:
        """Unload the model, and end the processes on other GPUs."""
        super().close()
        if isinstance(self._ranks, LeadingRank):
            self._ranks.close()
            self._ranks = None

    def describe_memory(self) -> str:
        """Describe the memory of each GPU."""
        tables = []
        for rank in range(self._options.gpus):
            self._rank = rank
            tables += [super().describe_memory()]
        self._rank = 0
        return "\n".join(tables)

    @property
    def _shard(self) -> Shard:
        return Shard(self._rank, self._options.gpus)

    def _placement(self) -> Placement:
        where, count = super()._placement(), self._options.gpus
        if where.device.type != "cuda" or count == 1:
            return where
        first, found = where.device.index, torch.cuda.device_count()
        if first + count > found:
            raise ConfigError(
                f"policy.gpus: {count} from cuda:{first} on, but torch sees {found} CUDA devices; set policy.gpus "
                f"to {max(1, found - first)}"
            )
        return replace(where, device=torch.device("cuda", first + self._rank))

    def _lead(self, where: Placement) -> LeadingRank:
        """Start the other ranks."""
        devices = [where.device] * self._options.gpus
        if where.device.type == "cuda":
            devices = [torch.device("cuda", where.device.index + rank) for rank in range(self._options.gpus)]
        return LeadingRank(describe(self._config, self._options), devices, self._config.timeouts.inference)
