"""What was measured, as findings for a person, options for a file, figures for JSON and a page with the curves."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from vla_ros.config import Config
from vla_ros.config.files import dump_yaml
from vla_ros.contract.state import Arm
from vla_ros.control.measured import joint_speeds
from vla_ros_lab.commission.measure import Response
from vla_ros_lab.commission.session import Measured
from vla_ros_lab.report import charts, page
from vla_ros_lab.report.page import Cell

_SAGS, _STICKS, _LATE, _NOISY = 0.02, 0.005, 0.1, 0.002  # rad or m, and s: from here on it is worth a finding
_SLOW, _UNEVEN = 30.0, 1.0  # Hz; share of a period
_APART = 0.1  # s between two clocks
_DRIFTS = 0.02  # rad or m in silence
_SAME = 0.15  # share by which the unit of commands and joint states may differ
_NODE_ENDS = 0.9  # s; shortly after that, the node itself ends the velocity
_HALF, _TWICE = 0.5, 2.0  # the margins

Name = tuple[str, str]


class Finding(NamedTuple):
    """What a person should know or do."""

    what: str  # a joint, an arm or a topic
    found: str
    fix: str


class Proposal(NamedTuple):
    """An option with a value that follows from what was measured, and how it follows."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True, eq=False)
class Result:
    """What a session measured, and what follows from it."""

    found: Measured
    answers: Mapping[Name, Response]
    ends_after: Mapping[str, float]  # s, by arm: when its driver ends a velocity; infinite if it does not

    @classmethod
    def of(cls, found: Measured) -> "Result":
        answers, ends = found.responses(), dict[str, float]()
        for arm, coast in found.coasts.items():
            after = coast - max(one.delay for (name, _), one in answers.items() if name == arm)
            ends[arm] = after if after < _NODE_ENDS else math.inf
        return cls(found, answers, ends)

    @property
    def surprise(self) -> str:
        """What ended everything, or a joint whose commands and joint states do not have the same unit."""
        for (_, joint), one in self.answers.items():
            if abs(one.gain - 1) > _SAME and not self.found.surprise:
                hint = " (57.3: its joint states are in degrees)" if 50 < one.gain < 65 else ""
                return f"{joint} moves {one.gain:.3g} times as far as it is commanded to{hint}"
        return self.found.surprise


def findings(result: Result, config: Config) -> Iterator[Finding]:
    """Yield what differs from an arm that follows at once and exactly."""
    found, answers = result.found, result.answers
    for topic, each in found.states.items():
        if each.rate_hz < _SLOW or each.jitter * each.rate_hz > _UNEVEN:
            what = f"joint states come at {each.rate_hz:.3g} Hz, with a jitter of {each.jitter:.3g} s"
            yield Finding(topic, what, "raise the driver's rate; commands are limited by what is measured")
    for topic, each in {**found.states, **found.cameras}.items():
        if abs(each.age) > _APART:
            side = "behind" if each.age > 0 else "ahead of"
            fix = "synchronise the clocks (chrony, PTP), or let the driver stamp on arrival"
            yield Finding(topic, f"stamps are {abs(each.age):.3g} s {side} this machine's clock", fix)
    for (_, joint), one in answers.items():
        if abs(one.offset) > _SAGS:
            yield Finding(joint, f"rests {one.offset:+.3g} from its command", "limits.following_error covers it")
        if one.stick > _STICKS:
            yield Finding(
                joint, f"sticks: {one.stick:.3g} on each side", "a policy's steps below that do not move it"
            )
        if one.delay > _LATE:
            yield Finding(
                joint, f"follows {one.delay:.3g} s late", "limits.following_error covers it; see the rate"
            )
        if one.noise > _NOISY:
            yield Finding(
                joint, f"its encoder is noisy: {one.noise:.2g} at rest", "check the encoder and its cable"
            )
    for (_, joint), drift in found.drifts.items():
        noise = max((each.noise for each in answers.values()), default=0.0)
        if drift > _DRIFTS + 4 * noise:
            what = f"drifts by {drift:.3g} when no command comes"
            yield Finding(joint, what, "the driver must hold its last position by itself; configure it so")
    for arm, after in result.ends_after.items():
        if math.isinf(after):
            fix = "configure a time-out in the driver; guard.process ends velocities if the node cannot"
            yield Finding(arm, "its driver does not end a velocity when commands cease", fix)
    for arm, grip in found.grips.items():
        options = next(each.gripper for each in config.arms if each.name == arm)
        gauge = options.gauge
        closed, opened = (gauge.closed, gauge.open) if gauge else (options.closed_position, options.open_position)
        if (grip.opened - grip.closed) * (opened - closed) < 0:
            what = f"the gripper is inverted: {grip.opened:.3g} when told to open, {grip.closed:.3g} to close"
            yield Finding(
                arm, what, "its commands and its joint states have different directions; repair its driver"
            )
        elif not grip.obeys:
            fix = "exchange gripper.open_position and gripper.closed_position"
            yield Finding(arm, "the gripper opens when it is told to close", fix)
        elif max(abs(grip.opened - opened), abs(grip.closed - closed)) > 0.1 * abs(opened - closed):
            what = f"the gripper reaches {grip.closed:.3g} to {grip.opened:.3g}, expected {closed:g} to {opened:g}"
            yield Finding(arm, what, "something is between its fingers, or gripper.* has other ends")


def proposals(result: Result, config: Config, arms: Mapping[str, Arm]) -> Iterator[Proposal]:
    """Yield the options that follow from the figures, with their margins."""
    found, answers = result.found, result.answers
    slowest = min(answers, key=lambda name: answers[name].deceleration)
    one = answers[slowest]
    least = "at least " if one.at_least else ""
    why = f"{slowest[1]}: {least}{one.deceleration:.3g}, from the low speed of commissioning; half of it"
    yield Proposal("collision.deceleration", _HALF * one.deceleration, why)
    for slides, option in ((False, "limits.following_error"), (True, "limits.following_error_prismatic")):
        trails = {
            name: _trails(name, answers[name], config, arms) for name in answers if _slides(name, arms) is slides
        }
        if trails:
            worst = max(trails, key=lambda name: trails[name][0])
            most, speed = trails[worst]
            why = (
                f"{worst[1]}: offset {abs(answers[worst].offset):.4f}, friction {answers[worst].stick:.4f}, "
                f"{answers[worst].delay:.3f} s at up to {speed:.3g}/s; twice that"
            )
            low, high = (0.02, 10.0) if slides else (0.1, 6.4)
            yield Proposal(option, min(max(_TWICE * most, low), high), f"{why}, {low:g} at least")
    for option, topics in (("joint_state", found.states), ("camera", found.cameras)):
        gap, now = max((each.longest for each in topics.values()), default=0.0), getattr(config.timeouts, option)
        if 0 < gap < math.inf:
            why = f"longest gap {gap:.3g} s, three times that"
            yield Proposal(f"timeouts.{option}", _tightened(max(3 * gap, 0.2), now, gap), f"{why}, {now:g} so far")
    for option, topics in (("joint_state_age", found.states), ("frame_age", found.cameras)):
        ages, now = [abs(each.age) for each in topics.values()], getattr(config.timeouts, option)
        age = max((each for each in ages if not math.isnan(each)), default=0.0)
        if age:
            why = f"stamps are {age:.3g} s old on arrival; 0.5 s more than twice that, {now:g} so far"
            yield Proposal(f"timeouts.{option}", _tightened(0.5 + 2 * age, now, age), why)
    if any(map(math.isinf, result.ends_after.values())):
        yield Proposal("guard.process", True, "the driver does not end a velocity by itself")
    speeds = [grip.speed for grip in found.grips.values() if math.isfinite(grip.speed)]
    if speeds:
        yield Proposal("gripper.max_speed", min(speeds), "as fast as its fingers were measured")


def _tightened(wanted: float, now: float, measured: float) -> float:
    """Return a time-out that is no longer than it was (0: none), unless what was measured comes near it."""
    return min(wanted, now) if 2 * measured < now else wanted


def _slides(name: Name, arms: Mapping[str, Arm]) -> bool:
    kinematics = arms[name[0]].kinematics
    assert kinematics is not None
    return bool(kinematics.is_prismatic[kinematics.joint_names.index(name[1])])


def _trails(name: Name, one: Response, config: Config, arms: Mapping[str, Arm]) -> tuple[float, float]:
    """Return how far a joint may be from its command, and the largest speed that the options allow it."""
    arm = next(each for each in config.arms if each.name == name[0])
    limits, rate = arm.limits, config.control.rate_hz if config.control.rate_hz > 0 else 5.0
    speed = limits.velocity_scale * joint_speeds(arm, arms[arm.name].joints, arms[arm.name].kinematics)[name[1]]
    speed = min(speed, limits.max_joint_step * rate, limits.max_joint_velocity or math.inf)
    return abs(one.offset) + one.stick + one.delay * speed, speed


def to_yaml(proposed: list[Proposal], told: list[Finding], title: str) -> str:
    """Return the proposals as a parameter file, to be given after the robot's own."""
    lines = [f"# {title}", "# Give it after the robot's file: --config ROBOT.yaml --config THIS.yaml"]
    lines += [f"# Found: {what}: {found}. {fix[:1].upper()}{fix[1:]}." for what, found, fix in told]
    lines += ["/**:", "  ros__parameters:"]
    for section in dict.fromkeys(each.name.partition(".")[0] for each in proposed):
        lines.append(f"    {section}:")
        for name, value, why in proposed:
            if name.startswith(f"{section}."):
                shown = float(f"{value:.3g}") if isinstance(value, float) else value
                lines += [f"      # {why}", f"      {name.partition('.')[2]}: {dump_yaml(shown)}"]
    return "\n".join(lines) + "\n"


def to_json(result: Result, told: list[Finding], proposed: list[Proposal]) -> dict[str, Any]:
    """Return all figures as plain JSON values; what is infinite or unknown is null."""
    found, answers = result.found, result.answers
    return {
        "surprise": result.surprise,
        "findings": [each._asdict() for each in told],
        "options": {name: _plain(value) for name, value, _ in proposed},
        "joints": {joint: _plain(asdict(one)) for (_, joint), one in answers.items()},
        "joint_states": {topic: _plain(asdict(one)) for topic, one in found.states.items()},
        "cameras": {topic: _plain(asdict(one)) for topic, one in found.cameras.items()},
        "silence": {joint: _plain(drift) for (_, joint), drift in found.drifts.items()},
        "velocity_ends_after_s": {arm: _plain(after) for arm, after in result.ends_after.items()},
        "grippers": {
            arm: _plain({name: getattr(grip, name) for name in ("closed", "opened", "speed", "obeys")})
            for arm, grip in found.grips.items()
        },
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_html(result: Result, told: list[Finding], proposed: list[Proposal], title: str) -> str:
    """Return the page: what was found, each joint's curves, the options."""
    found, answers = result.found, result.answers
    level = "bad" if result.surprise else "warn" if told else "good"
    headline = result.surprise and f"Stopped: {result.surprise}"
    headline = headline or (f"{len(told)} findings" if told else "The arm follows as its options say")
    curves = []
    for (_, joint), (commanded, measured, _) in found.motions.items():
        start = float(commanded.time[0])
        series = [
            charts.Series("commanded", commanded.time - start, commanded.position, 0, step=True),
            charts.Series("measured", measured.time - start, measured.position),
        ]
        curves.append(charts.lines(series, title=joint, x_label="s"))
    for arm, grip in found.grips.items():
        series = [charts.Series("measured", grip.track.time - grip.track.time[0], grip.track.position)]
        curves.append(charts.lines(series, title=f"gripper of {arm}", x_label="s"))
    columns = ("gain", "offset", "stick", "delay", "following", "deceleration", "noise")
    units = ("", " [rad, m]", " [rad, m]", " [s]", " [rad, m]", " [1/s²]", " [rad, m]")
    rows: list[list[Cell]] = [
        [joint, *(f"≥ {one.deceleration:.3g}" if name == "deceleration" and one.at_least else getattr(one, name)
                  for name in columns)]
        for (_, joint), one in answers.items()
    ]  # fmt: skip
    times: list[list[Cell]] = [
        [topic, one.rate_hz, one.jitter, one.longest, one.age]
        for topic, one in {**found.states, **found.cameras}.items()
    ]
    options: list[list[Cell]] = [[name, _shown(value), why] for name, value, why in proposed]
    body = [
        page.verdict(level, headline, [f"{what}: {text}; {fix}" for what, text, fix in told]),
        page.section("Curves", page.cards(curves)),
        page.section("Joints", page.table(["joint", *map("".join, zip(columns, units, strict=True))], rows)),
        page.section(
            "Messages", page.table(["topic", "rate [Hz]", "jitter [s]", "longest gap [s]", "age [s]"], times)
        ),
        page.section("Options", page.table(["option", "value", "why"], options)),
    ]
    return page.document(title, "Measured at low speed, one joint after the other.", body, "vla-ros commission")


def _shown(value: Any) -> str | float:
    return float(value) if isinstance(value, (float, np.floating)) else str(value)
