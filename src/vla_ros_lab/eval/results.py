"""Results of episodes: one line of a log for each, and a JSON file that vla-eval's tools read."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.files import read_json_value, save_text
from vla_ros.telemetry.execution import Steadiness
from vla_ros.types import FloatArray, IntArray, UInt8Array
from vla_ros_lab.eval.intervals import wilson

_VERSION = "0.8.0"  # of vla-eval, whose result format is written
_DIGESTS = {"checkpoint": "weights", "config": "options", "benchmark": "options"}  # of a setting that is a path
CHECKPOINT = ("policy.checkpoint", "policy.view")
"""Options that are paths of what is scored."""


@dataclass(frozen=True)
class Commands:
    """The commands to the first arm in an episode."""

    # Times of arrival and end of the episode, seconds, float64 [T + 1]; empty in lockstep.
    times: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Stamp of each command's frame, nanoseconds, int64 [T]; the same for all commands of a chunk.
    stamps: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Joint positions, float64 [T, N], radians.
    positions: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))


def steadiness(episodes: Iterable[Commands], rate_hz: float) -> dict[str, float]:
    """Return gaps and seams of the commands (:meth:`Steadiness.figures`), which are due at ``rate_hz``."""
    statistics, period = Steadiness(), 1 / rate_hz
    for commands in episodes:
        statistics.interrupted()
        for at in commands.times:
            statistics.waited(float(at), period)
        begins = np.diff(commands.stamps, prepend=commands.stamps[:1]) != 0
        for positions, begins_chunk in zip(commands.positions, begins, strict=True):
            statistics.moved(positions, None, period, begins_chunk=bool(begins_chunk))
    return statistics.figures()


@dataclass(frozen=True)
class Trace:
    """What happened in an episode, for the report; the log does not keep it."""

    # Upright images, uint8 [H, W, 3] RGB, in order of time.
    images: tuple[UInt8Array, ...] = ()
    # Float64 [T, D], the policy's actions before limits and kinematics; [0, 0] if none was received.
    actions: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    # Float64 [T, arms, 3], measured position of each arm's ``tool`` in the table's frame, metres.
    tips: FloatArray = field(default_factory=lambda: np.zeros((0, 1, 3)))
    # Float64 [T, arms], measured opening of one finger, metres (0 closed, 0.04 open).
    fingers: FloatArray = field(default_factory=lambda: np.zeros((0, 1)))
    target: str = ""  # names of the requested objects, for example ``red_cube and blue_ball``
    commands: Commands = field(default_factory=Commands)  # commands to the first arm


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
    reason: str = ""  # ``success``, ``failure``, ``wrong_object``, ``timeout`` or ``no_command``
    touched: str = ""  # name of the object that was moved instead, or ""
    trace: Trace = field(default_factory=Trace, compare=False)

    @property
    def key(self) -> tuple[str, int]:
        return self.task, self.state


_LOGGED = [leaf.name for leaf in fields(Score) if leaf.name != "trace"]


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


def motion_of(scores: Iterable[Score]) -> dict[str, float | None]:
    """Return ``stalled_share``, ``longest_gap_ms`` and ``seam_ratio``; None if a figure does not apply."""
    moved = [score for score in scores if score.seconds]
    rate_hz = moved[0].steps / moved[0].seconds if moved else 1.0
    figures = steadiness([score.trace.commands for score in moved], rate_hz)
    return {name: figures.get(name) for name in ("stalled_share", "longest_gap_ms", "seam_ratio")}


def by_task(scores: Iterable[Score]) -> dict[str, list[Score]]:
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.task, []).append(score)
    return found


def unjudged(scores: Sequence[Score]) -> str:
    """Return why the episodes say nothing of the policy, or "": each ended in an error or had no command."""
    if any(score.success is not None and score.held < score.steps for score in scores):
        return ""
    first = next((f"; the first: {score.error}" for score in scores if score.error), "")
    return f"no episode was judged: each of {len(scores)} ended in an error, or had no command{first}"


def to_json(scores: Sequence[Score], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results in the layout of vla-eval 0.8.0 (``BenchmarkResult``), with further fields.

    ``success_rate``, ``low``, ``high``, ``episodes`` and ``errors`` are those of all tasks. An episode with an
    error has a ``failure_reason`` and no metric, so that no mean contains it.
    """
    whole = summary_of(scores)
    tasks = {task: (each, summary_of(each)) for task, each in by_task(scores).items()}
    return {
        "success_rate": whole.rate,
        "episodes": whole.episodes,
        "errors": whole.errors,
        "benchmark": name,
        "mode": settings["mode"],
        "harness_version": _VERSION,
        "created_at": datetime.now(timezone.utc).isoformat(),
        "tasks": [
            {
                "task": task,
                "episodes": list(map(_episode, each)),
                "num_episodes": found.episodes,
                "avg_steps": found.steps,
                **_success(found),
            }
            for task, (each, found) in tasks.items()
        ],
        "config": dict(settings),
        "metric_keys": {"success": "mean"},
        "num_episodes_total": whole.episodes,
        **{f"{name}_share": getattr(whole, name) for name in ("held", "limited", "refused")},
        "inference_ms": None if np.isnan(whole.inference_ms) else whole.inference_ms,
        **_success(whole),
    }


def _success(found: Summary) -> dict[str, Any]:
    rate = {"mean_success": round(found.rate, 4), "num_errors": found.errors}
    return {**rate, "low": found.low, "high": found.high}


def _episode(score: Score) -> dict[str, Any]:
    metrics = {**score.metrics, "success": score.success}
    wrong = {"metrics": {}, "failure_reason": "error", "failure_detail": score.error}
    ours = ("steps", "instruction", "seconds", "limited", "held", "refused", "late", "inference_ms", "video")
    return {
        "episode_id": score.state,
        "elapsed_sec": score.elapsed_s,
        "reason": score.reason,
        **({"metrics": metrics} if score.success is not None else wrong),
        **{name: getattr(score, name) for name in ours},
    }


def read_results(path: Path) -> dict[tuple[str, int], bool | None]:
    """Return each episode's outcome by task and initial state, from a file of this command or of vla-eval."""
    try:
        tasks = read_json_value(path)["tasks"]
        found = {(task["task"], int(one["episode_id"])): one for task in tasks for one in task["episodes"]}
        failed = {key for key, one in found.items() if one.get("failure_reason")}
        return {key: None if key in failed else bool(one["metrics"]["success"]) for key, one in found.items()}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: no results of vla-ros eval or vla-eval ({why})") from None


def weights_of(path: Path) -> str:
    """Return the digest of the checkpoint that a file of :func:`to_json` scored; "" if it does not say so."""
    config = read_json_value(path).get("config")
    return str(config.get("weights") or "") if isinstance(config, dict) else ""


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings in both that differ; a log of an older release has fewer.

    A digest counts where both have it, and not the path of what it is of. A policy server may be started again at
    another port.
    """
    paths = {path for path, digest in _DIGESTS.items() if before.get(digest) and now.get(digest)}
    hidden = CHECKPOINT if "checkpoint" in paths else ()

    def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
        words = [
            re.sub(r"^(policy\.server:=.*):\d+(?=[/?]|$)", r"\1", word) for word in settings.get("param") or ()
        ]
        return {**settings, "param": [word for word in words if word.split(":=")[0] not in hidden]}

    then, after = plain(before), plain(now)
    return sorted(name for name in (then.keys() & after.keys()) - paths if then[name] != after[name])


class Log:
    """The episodes so far, one JSON line each after a line of settings; several processes may append.

    ``resume``: keep the episodes of a file with the same settings; otherwise an existing file is replaced.
    ``alone`` is False for a shard, whose file others append to.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool, alone: bool = True) -> None:
        self.path, plain = path, dict(settings)
        if resume and path.exists():
            before = self._lines()[0]
            if different := _changed(before, plain):
                key = different[0]
                found = f"was made with {key} = {before.get(key)}, now {plain.get(key)}"
                raise ConfigError(f"--resume {path}: {found}; use the same options, or another --json")
            if alone:  # a line that was half written when a process was killed
                save_text(path, "".join(path.read_text(encoding="utf-8").rpartition("\n")[:2]))
        else:
            save_text(path, json.dumps(plain) + "\n")

    def append(self, score: Score) -> None:
        """Append an episode in one write, so that lines of several processes do not mix."""
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write((json.dumps({name: getattr(score, name) for name in _LOGGED}) + "\n").encode())
        except OSError as error:
            raise VlaRosError(f"{self.path}: cannot be written ({error.strerror})") from None

    def scores(self) -> list[Score]:
        """Return the episodes; a later one of the same task and state replaces an earlier one."""
        found = {}
        for line in self._lines()[1:]:
            score = Score(**{name: value for name, value in line.items() if name in _LOGGED})
            found[score.key] = score
        return list(found.values())

    def _lines(self) -> list[dict[str, Any]]:
        try:
            # The last line may be half written.
            whole, _, _ = self.path.read_text(encoding="utf-8").rpartition("\n")
            return [json.loads(line) for line in whole.splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: is no log of vla-ros eval ({error})") from None
