"""Results of an evaluation: one line of a log for each episode, and a JSON file that vla-eval's tools read."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.files import read_json_value, save_text
from vla_ros_lab.eval.intervals import wilson

_VERSION = "0.8.0"  # of vla-eval, whose result format is written


@dataclass(frozen=True)
class Score:
    """The result of one episode."""

    task: str
    state: int  # number of the initial state, or the seed of the scene
    success: bool | None  # None: an error, neither a success nor a failure
    error: str = ""
    instruction: str = ""
    steps: int = 0  # control steps
    seconds: float = 0.0  # of the environment's time
    elapsed_s: float = 0.0  # of wall-clock time
    limited: int = 0  # steps whose action a limit or a clip changed
    held: int = 0  # steps without a command, in which the arm was held
    refused: int = 0  # steps that the node refused
    late: int = 0  # on the wall clock: steps for which the environment was too slow
    inference_ms: tuple[float, ...] = ()  # median and 99th percentile
    metrics: Mapping[str, Any] = field(default_factory=dict)  # what the benchmark says
    video: str = ""  # file

    @property
    def key(self) -> tuple[str, int]:
        return self.task, self.state


@dataclass(frozen=True)
class Summary:
    """Figures of several episodes."""

    episodes: int
    errors: int
    successes: int
    low: float  # ends of the 95 % interval of the success rate
    high: float
    steps: float  # mean
    seconds: float  # mean
    held: float  # share of all steps
    limited: float
    refused: float
    inference_ms: float  # median over the episodes; NaN if unknown

    @property
    def rate(self) -> float:
        """Share of successes among the episodes without error; 0 if there are none."""
        return self.successes / max(1, self.episodes - self.errors)


def summary_of(scores: Sequence[Score]) -> Summary:
    good = [score for score in scores if score.success is not None]
    won = sum(bool(score.success) for score in good)
    total = sum(score.steps for score in good) or 1
    times = [score.inference_ms[0] for score in good if score.inference_ms]
    means = {name: sum(getattr(score, name) for score in good) / max(1, len(good)) for name in ("steps", "seconds")}
    shares = {name: sum(getattr(score, name) for score in good) / total for name in ("held", "limited", "refused")}
    median = float(np.median(times)) if times else float("nan")
    low, high = wilson(won, len(good))
    return Summary(len(scores), len(scores) - len(good), won, low, high, inference_ms=median, **means, **shares)


def by_task(scores: Iterable[Score]) -> dict[str, list[Score]]:
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.task, []).append(score)
    return found


def to_json(scores: Sequence[Score], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results in the layout of vla-eval 0.8.0 (``BenchmarkResult``), with further fields.

    ``success_rate``, ``low``, ``high``, ``episodes`` and ``errors`` are those of all tasks. An episode with an
    error has a ``failure_reason`` and no metric, so that no mean contains it.
    """
    whole = summary_of(scores)
    return {
        "success_rate": whole.rate,
        "low": whole.low,
        "high": whole.high,
        "episodes": whole.episodes,
        "errors": whole.errors,
        "benchmark": name,
        "mode": settings["mode"],
        "harness_version": _VERSION,
        "created_at": datetime.now(timezone.utc).isoformat(),
        "tasks": [_task(task, each) for task, each in by_task(scores).items()],
        "config": dict(settings),
        "metric_keys": {"success": "mean"},
        "mean_success": round(whole.rate, 4),
        "num_errors": whole.errors,
        "num_episodes_total": whole.episodes,
        "held_share": whole.held,
        "limited_share": whole.limited,
        "refused_share": whole.refused,
        "inference_ms": None if np.isnan(whole.inference_ms) else whole.inference_ms,
    }


def _task(task: str, scores: Sequence[Score]) -> dict[str, Any]:
    found = summary_of(scores)
    return {
        "task": task,
        "episodes": [_episode(score) for score in scores],
        "num_episodes": found.episodes,
        "num_errors": found.errors,
        "avg_steps": found.steps,
        "mean_success": round(found.rate, 4),
        "low": found.low,
        "high": found.high,
    }


def _episode(score: Score) -> dict[str, Any]:
    said = {} if score.success is None else {**score.metrics, "success": score.success}
    wrong = {"failure_reason": "error", "failure_detail": score.error} if score.success is None else {}
    ours = ("instruction", "seconds", "limited", "held", "refused", "late", "inference_ms", "video")
    return {
        "episode_id": score.state,
        "metrics": said,
        "steps": score.steps,
        "elapsed_sec": score.elapsed_s,
        **wrong,
        **{name: getattr(score, name) for name in ours},
    }


def read_results(path: Path) -> dict[tuple[str, int], bool | None]:
    """Return each episode's outcome by task and initial state, from a file of this command or of vla-eval."""
    try:
        tasks = read_json_value(path)["tasks"]
        return {
            (task["task"], int(one["episode_id"])): None
            if one.get("failure_reason")
            else bool(one["metrics"]["success"])
            for task in tasks
            for one in task["episodes"]
        }
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: no results of vla-ros eval or vla-eval ({type(error).__name__}: {error})"
        ) from None


def _without_port(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the policy server's port: a server may be started again at another one."""
    words = [re.sub(r"^(policy\.server:=.*):\d+(?=[/?]|$)", r"\1", word) for word in settings.get("param") or ()]
    return {**settings, "param": words}


class Log:
    """The episodes so far, one JSON line each after a line of settings; several processes may append.

    ``resume``: keep the episodes of a file with the same settings; otherwise an existing file is replaced.
    ``alone`` is False for a shard, whose file others append to.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool, alone: bool = True) -> None:
        self.path = path
        plain = dict(settings)
        if resume and path.exists():
            before = self._lines()[0]
            now, then = _without_port(plain), _without_port(before)
            different = [key for key in now.keys() | then.keys() if now.get(key) != then.get(key)]
            if different:
                key = min(different)
                raise ConfigError(
                    f"--resume {path}: was made with {key} = {before.get(key)}, now {plain.get(key)}; use the same "
                    "options, or another --json"
                )
            if alone:  # a line that was half written when a process was killed
                save_text(path, "".join(path.read_text(encoding="utf-8").rpartition("\n")[:2]))
        else:
            save_text(path, json.dumps(plain) + "\n")

    def append(self, score: Score) -> None:
        """Append an episode in one write, so that lines of several processes do not mix."""
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write((json.dumps(asdict(score)) + "\n").encode())
        except OSError as error:
            raise VlaRosError(f"{self.path}: cannot be written ({error.strerror})") from None

    def scores(self) -> list[Score]:
        """Return the episodes; a later one of the same task and state replaces an earlier one."""
        names = {leaf.name for leaf in fields(Score)}
        found = {}
        for line in self._lines()[1:]:
            score = Score(**{name: value for name, value in line.items() if name in names})
            found[score.key] = score
        return list(found.values())

    def _lines(self) -> list[dict[str, Any]]:
        try:
            whole, _, _ = self.path.read_text(encoding="utf-8").rpartition(
                "\n"
            )  # the last line may be half written
            return [json.loads(line) for line in whole.splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: is no log of vla-ros eval ({error})") from None
