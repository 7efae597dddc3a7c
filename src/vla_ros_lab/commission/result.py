"""What was measured: figures and findings, options that follow from them, and a page with the curves."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from vla_ros.config import Config
from vla_ros.config.files import dump_yaml, parameter_file
from vla_ros_lab.commission.measure import AxisResponse, measure_motion, middle
from vla_ros_lab.commission.motion import NODE_ENDS, MovedAxis
from vla_ros_lab.commission.session import Commissioning
from vla_ros_lab.report import charts, page

_LAGS = "limits.following_error covers it"
_JOINT_FINDINGS = (  # a figure, from where on it is worth a finding (rad or m, s), what was found, what to do
    ("offset", 0.02, "rests {:+.3g} from its command", _LAGS),
    ("stick", 0.005, "sticks: {:.3g} on each side", "smaller steps of a policy do not move it"),
    ("delay", 0.1, "follows {:.3g} s late", _LAGS),
    ("noise", 0.002, "its encoder is noisy: {:.2g} at rest", "check the encoder and its cable"),
)
_SLOW, _UNEVEN = 30.0, 1.0  # Hz; share of a period
_APART, _DRIFTS = 0.1, 0.02  # s between two clocks; rad or m in silence
_SAME = 0.25  # share by which the unit of commands and joint states may differ
_HALF, _TWICE, _GAPS = 0.5, 2.0, 3.0  # the margins


def figures_of(session: Commissioning, given: Config) -> dict[str, Any]:
    """Return all figures, findings and options, as plain JSON values; what is infinite or unknown is null."""
    joints = {axis: measure_motion(*each[:4]) for axis, each in session.motions.items() if not axis.grips}
    wrong = [(axis, one.gain) for axis, one in joints.items() if abs(one.gain - 1) > _SAME]
    surprise = session.surprise
    if wrong and not surprise:
        surprise = "{} moves {:.3g} times as far as commanded (57.3 would be degrees)".format(*wrong[0])
    ends = {axis.arm: seconds - joints[axis].delay for axis, seconds in session.coasts.items() if axis in joints}
    ends = {arm: after if after < NODE_ENDS - 0.1 else math.inf for arm, after in ends.items()}
    states = {arm.joint_states for arm in given.arms}
    figures: dict[str, Any] = {
        "joints": joints,
        "joint_states": {topic: each for topic, each in session.rhythms.items() if topic in states},
        "cameras": {topic: each for topic, each in session.rhythms.items() if topic not in states},
        "silence": session.drifts,
        "velocity_ends_after_s": ends,
        "grippers": {axis.arm: _grip(axis, session) for axis in session.motions if axis.grips},
    }
    figures["findings"] = [
        dict(zip(("what", "found", "fix"), each, strict=True)) for each in _findings(figures, session)
    ]
    options = [] if surprise else [*_options(figures, given)]
    figures["options"] = {name: float(f"{value:.3g}") if value is not True else True for name, value, _ in options}
    figures["why"] = {name: why for name, _, why in options}
    plain: dict[str, Any] = _plain({"surprise": surprise, **figures})
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _grip(axis: MovedAxis, session: Commissioning) -> dict[str, float | bool]:
    """Return where a gripper came to rest when told to close and to open, and how fast it moves at half way."""
    motion = session.motions[axis]
    at = [float(motion.measured.at(np.array([end + 0.9 * motion.rests]))[0]) for end in motion.ends]
    goals = motion.commanded.at(np.array(motion.ends) + 0.9 * motion.rests)
    closed, opened = at if abs(goals[0] - axis.low) < abs(goals[1] - axis.low) else at[::-1]
    speed = abs(middle(motion.measured.between(motion.ends[1], math.inf))[0])
    return {"closed": closed, "opened": opened, "speed": speed, "obeys": motion.confirmed}


def _findings(figures: dict[str, Any], session: Commissioning) -> Iterator[tuple[str, str, str]]:
    """Yield what differs from an arm that follows at once and exactly: where, what, and what to do."""
    for topic, each in figures["joint_states"].items():
        if each.rate_hz < _SLOW or each.jitter * each.rate_hz > _UNEVEN:
            found = f"joint states come at {each.rate_hz:.3g} Hz, with a jitter of {each.jitter:.3g} s"
            yield topic, found, "raise the driver's rate; commands are limited by what is measured"
    for topic, each in session.rhythms.items():
        if abs(each.age) > _APART:
            found = (
                f"stamps are {abs(each.age):.3g} s {'behind' if each.age > 0 else 'ahead of'} this machine's clock"
            )
            yield topic, found, "synchronise the clocks (chrony, PTP), or let the driver stamp on arrival"
    for axis, one in figures["joints"].items():
        for name, most, found, fix in _JOINT_FINDINGS:
            if abs(value := getattr(one, name)) > most:
                yield str(axis), found.format(value), fix
        if (drift := session.drifts.get(axis, 0.0) - 8 * one.noise) > _DRIFTS and not axis.by_velocity:
            yield str(axis), f"drifts by {drift:.3g} when no command comes", "let its driver hold the last position"
    for arm, after in figures["velocity_ends_after_s"].items():
        if math.isinf(after):
            fix = "configure a time-out in the driver; guard.process ends velocities if the node cannot"
            yield arm, "its driver does not end a velocity when commands cease", fix
    for axis in (each for each in session.motions if each.grips):
        closed, opened, _, obeys = figures["grippers"][axis.arm].values()
        reached, width = f"{closed:.3g} when told to close, {opened:.3g} to open", axis.high - axis.low
        if (opened - closed) * width < 0:
            fix = "its commands and its joint states have different directions; repair its driver"
            yield axis.arm, f"the gripper is inverted: {reached}", fix
        elif not obeys:
            fix = "exchange gripper.open_position and gripper.closed_position"
            yield axis.arm, "the gripper opens when it is told to close", fix
        elif max(abs(opened - axis.high), abs(closed - axis.low)) > 0.1 * abs(width):
            fix = "something is between its fingers, or gripper.* has other ends"
            yield axis.arm, f"the gripper is at {reached}", f"expected {axis.low:g} and {axis.high:g}: {fix}"


def _options(figures: dict[str, Any], given: Config) -> Iterator[tuple[str, Any, str]]:
    """Yield the options that follow from the figures, with their margins, and how they follow."""
    limits, rate = given.limits, given.control.rate_hz if given.control.rate_hz > 0 else 5.0
    joints: dict[MovedAxis, AxisResponse] = {
        axis: one for axis, one in figures["joints"].items() if not axis.is_tip
    }
    if joints:
        joint, one = min(joints.items(), key=lambda item: item[1].deceleration)
        least = f"{'at least ' if one.at_least else ''}{one.deceleration:.3g}"
        why = f"{joint}: {least}, from the low speed of commissioning; half of it"
        yield "collision.deceleration", _HALF * one.deceleration, why
    trails: dict[bool, list[tuple[float, str]]] = {}
    for joint, one in joints.items():
        speeds = limits.velocity_scale * joint.fastest, limits.max_joint_step * rate
        speed, sag = min(*speeds, limits.max_joint_velocity or math.inf), abs(one.offset)
        why = f"{joint}: offset {sag:.4f}, friction {one.stick:.4f}, {one.delay:.3f} s at up to {speed:.3g}/s"
        trails.setdefault(joint.slides, []).append((sag + one.stick + one.delay * speed, why))
    for slides, each in trails.items():
        (most, why), (low, high) = max(each), (0.02, 10.0) if slides else (0.1, 6.4)
        name = f"limits.following_error{'_prismatic' if slides else ''}"
        yield name, min(max(_TWICE * most, low), high), f"{why}; twice that, {low:g} at least"
    for kind, old in (("joint_state", "joint_state_age"), ("camera", "frame_age")):
        rhythms = [each for each in figures[f"{kind}s"].values() if math.isfinite(each.longest)]
        gap = max((each.longest for each in rhythms), default=0.0)
        age = max((abs(each.age) for each in rhythms if math.isfinite(each.age)), default=0.0)
        for name, value, seen, why in (
            (kind, max(_GAPS * gap, 0.2), gap, f"longest gap {gap:.3g} s, three times that"),
            (old, 0.5 + _TWICE * age, age, f"stamps are {age:.3g} s old on arrival; 0.5 s more than twice that"),
        ):
            now = getattr(given.timeouts, name)  # not longer than it was, unless what was measured comes near it
            if seen:
                yield f"timeouts.{name}", min(value, now) if 2 * seen < now else value, f"{why}, {now:g} so far"
    if any(map(math.isinf, figures["velocity_ends_after_s"].values())):
        yield "guard.process", True, "the driver does not end a velocity by itself"
    if quick := [grip["speed"] for grip in figures["grippers"].values()]:
        yield "gripper.max_speed", min(quick), "as fast as its fingers were measured"


def findings_of(figures: dict[str, Any]) -> list[str]:
    """Return the findings, a sentence each."""
    return ["{what}: {found}; {fix}".format(**each) for each in figures["findings"]]


def options_file(figures: dict[str, Any], title: str) -> str:
    """Return the options as a parameter file, to be given after the robot's own."""
    sections = dict[str, list[str]]()
    for name, value in figures["options"].items():
        section, _, leaf = name.partition(".")
        sections.setdefault(section, []).extend((f"# {figures['why'][name]}", f"{leaf}: {dump_yaml(value)}"))
    use = "Give it after the robot's file: --config ROBOT.yaml --config THIS.yaml"
    return parameter_file([title, use, *(f"Found: {each}" for each in findings_of(figures))], sections)


def to_html(figures: dict[str, Any], session: Commissioning, title: str) -> str:
    """Return the page: what was found, the curves of each axis, the options, the figures."""
    curves, surprise = list[Any](), figures["surprise"]
    for axis, motion in session.motions.items():
        tracks = ("commanded", motion.commanded), ("measured", motion.measured)
        start = motion.measured.time[0]
        lines = [
            charts.Series(name, track.time - start, track.position, index, step=not index)
            for index, (name, track) in enumerate(tracks)
        ]
        curves.append(charts.lines(lines, title=str(axis), x_label="s"))
    level = "bad" if surprise else "warn" if figures["findings"] else "good"
    headline = f"Stopped: {surprise}" if surprise else f"{len(figures['findings']) or 'no'} findings"
    options = [(name, str(value), figures["why"][name]) for name, value in figures["options"].items()]
    groups = figures["joints"], figures["joint_states"] | figures["cameras"]
    rows = [[{"of": name, **each} for name, each in group.items()] for group in groups if group]
    tables = [page.mapped(each, {name: name for name in each[0]}) for each in rows]
    body = [
        page.verdict(level, headline, findings_of(figures)),
        page.section("Curves", page.cards(curves), "Positions in radians or metres."),
        page.section("Options", page.table(("option", "value", "why"), options)),
        page.section("Figures", tables, "In radians or metres, and seconds (docs/commissioning.md)."),
    ]
    return page.document(title, "Measured at low speed, one joint after the other.", body, "vla-ros commission")
