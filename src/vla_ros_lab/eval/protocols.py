"""Published protocols of benchmarks, and the published scores of checkpoints (``protocols.yaml``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vla_ros.errors import ConfigError

_FILE = Path(__file__).with_name("protocols.yaml")


@dataclass(frozen=True)
class Protocol:
    """A published evaluation protocol: the benchmark's parameters, episodes, step limit and control rate."""

    benchmark: str  # import string
    params: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    episodes: int | None = None  # of each task; None: as the benchmark says
    max_steps: int | None = None  # of an episode; None: as the benchmark says
    rate_hz: float = 0.0  # control steps per second; 0: as the policy says
    execute_steps: int = 0  # of a chunk; 0: as the checkpoint says
    differs: str = ""  # what of the published protocol vla-eval's benchmark cannot do


def _data() -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return found


def find_protocol(name: str) -> Protocol | None:
    """Return the protocol NAME or NAME@PROTOCOL; None if no benchmark has that name.

    Raises ConfigError if the benchmark has no such protocol.
    """
    suite, _, chosen = name.partition("@")
    for family in _data().values():
        if isinstance(family, Mapping) and suite in family["suites"]:
            known = family["protocols"]
            if (chosen or "vla-eval") not in known:
                raise ConfigError(f"found protocol '{chosen}' of {suite}, expected one of {', '.join(known)}")
            one = known[chosen or "vla-eval"]
            steps = one.get("steps", {}).get(suite, family["suites"][suite])
            params = {"suite": suite, **one["params"]}
            own = {name: one[name] for name in ("execute_steps", "differs") if name in one}
            return Protocol(family["benchmark"], params, family["episodes"], steps, family["rate_hz"], **own)
    return None


def published_score(checkpoint: str, name: str) -> str:
    """Return the published success of a checkpoint, named by its folder, on a benchmark; "" if none is known."""
    folder, suite = Path(checkpoint).name, name.partition("@")[0]
    for entry in _data()["published"]:
        if folder in entry["checkpoints"] and suite in entry["scores"]:
            return f"published: {folder} on {suite}: {entry['scores'][suite]:g} % ({entry['source']})"
    return ""
