"""What was measured, as findings for a person, options for a file, figures for JSON and a page with the curves."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from vla_ros.config import Config
from vla_ros.config.files import dump_yaml
from vla_ros_lab.commission.measure import JointResponse
from vla_ros_lab.commission.motion import MovedJoint
from vla_ros_lab.commission.session import Found
from vla_ros_lab.report import charts, page

_SAGS, _STICKS, _LATE, _NOISY = 0.02, 0.005, 0.1, 0.002  # rad or m, and s: from here on it is worth a finding
_SLOW, _UNEVEN = 30.0, 1.0  # Hz; share of a period
_APART, _DRIFTS = 0.1, 0.02  # s between two clocks; rad or m in silence
_SAME = 0.25  # share by which the unit of commands and joint states may differ
_HALF, _TWICE, _GAPS = 0.5, 2.0, 3.0  # the margins
_LAGS = "limits.following_error covers it"


class Remark(NamedTuple):
    """What a person should know or do."""

    what: str  # a joint, an arm or a topic
    found: str
    fix: str


class Proposal(NamedTuple):
    """An option with a value that follows from what was measured, and how it follows."""

    name: str
    value: Any
    why: str


def surprise_of(found: Found) -> str:
    """Return what ended everything, or names a joint whose commands and joint states have different units."""
    for joint, one in found.responses.items():
        if abs(one.gain - 1) > _SAME and not found.surprise:
            return f"{joint} moves {one.gain:.3g} times as far as commanded (57.3 would be degrees)"
    return found.surprise


def findings(found: Found, config: Config) -> Iterator[Remark]:
    """Yield what differs from an arm that follows at once and exactly."""
    for topic, each in found.states.items():
        if each.rate_hz < _SLOW or each.jitter * each.rate_hz > _UNEVEN:
            what = f"joint states come at {each.rate_hz:.3g} Hz, with a jitter of {each.jitter:.3g} s"
            yield Remark(topic, what, "raise the driver's rate; commands are limited by what is measured")
    for topic, each in {**found.states, **found.cameras}.items():
        if abs(each.age) > _APART:
            what = (
                f"stamps are {abs(each.age):.3g} s {'behind' if each.age > 0 else 'ahead of'} this machine's clock"
            )
            yield Remark(topic, what, "synchronise the clocks (chrony, PTP), or let the driver stamp on arrival")
    for joint, one in found.responses.items():
        drift = found.drifts.get(joint, 0.0) - 8 * one.noise
        for value, most, what, fix in (
            (abs(one.offset), _SAGS, f"rests {one.offset:+.3g} from its command", _LAGS),
            (
                one.stick,
                _STICKS,
                f"sticks: {one.stick:.3g} on each side",
                "smaller steps of a policy do not move it",
            ),
            (one.delay, _LATE, f"follows {one.delay:.3g} s late", _LAGS),
            (
                one.noise,
                _NOISY,
                f"its encoder is noisy: {one.noise:.2g} at rest",
                "check the encoder and its cable",
            ),
            (
                drift,
                _DRIFTS,
                f"drifts by {drift:.3g} when no command comes",
                "let its driver hold the last position",
            ),
        ):
            if value > most:
                yield Remark(str(joint), what, fix)
    for arm, after in found.ends_after.items():
        if math.isinf(after):
            fix = "configure a time-out in the driver; guard.process ends velocities if the node cannot"
            yield Remark(arm, "its driver does not end a velocity when commands cease", fix)
    for arm, grip in found.grips.items():
        gripper = next(each.gripper for each in config.arms if each.name == arm)
        gauge, reached = gripper.gauge, f"{grip.closed:.3g} when told to close, {grip.opened:.3g} to open"
        closed, opened = (gauge.closed, gauge.open) if gauge else (gripper.closed_position, gripper.open_position)
        if (grip.opened - grip.closed) * (opened - closed) < 0:
            fix = "its commands and its joint states have different directions; repair its driver"
            yield Remark(arm, f"the gripper is inverted: {reached}", fix)
        elif not grip.obeys:
            fix = "exchange gripper.open_position and gripper.closed_position"
            yield Remark(arm, "the gripper opens when it is told to close", fix)
        elif max(abs(grip.opened - opened), abs(grip.closed - closed)) > 0.1 * abs(opened - closed):
            fix = (
                f"expected {closed:g} and {opened:g}: something is between its fingers, or gripper.* has other ends"
            )
            yield Remark(arm, f"the gripper is at {reached}", fix)


def proposals(found: Found, config: Config) -> Iterator[Proposal]:
    """Yield the options that follow from the figures, with their margins."""
    answers = found.responses
    joint, one = min(answers.items(), key=lambda item: item[1].deceleration)
    least = "at least " if one.at_least else ""
    why = f"{joint}: {least}{one.deceleration:.3g}, from the low speed of commissioning; half of it"
    yield Proposal("collision.deceleration", _HALF * one.deceleration, why)
    for slides, option, low, high in ((False, "", 0.1, 6.4), (True, "_prismatic", 0.02, 10.0)):
        trails = {each: _trail(each, answers[each], config) for each in answers if each.slides is slides}
        if trails:
            joint = max(trails, key=lambda each: trails[each][0])
            most, why = trails[joint]
            value = min(max(_TWICE * most, low), high)
            yield Proposal(
                f"limits.following_error{option}", value, f"{joint}: {why}; twice that, {low:g} at least"
            )
    for kind, topics in (("joint_state", found.states), ("camera", found.cameras)):
        gap = max((each.longest for each in topics.values() if math.isfinite(each.longest)), default=0.0)
        age = max((abs(each.age) for each in topics.values() if math.isfinite(each.age)), default=0.0)
        old = "frame_age" if kind == "camera" else "joint_state_age"
        for name, value, seen, why in (
            (kind, max(_GAPS * gap, 0.2), gap, f"longest gap {gap:.3g} s, three times that"),
            (old, 0.5 + _TWICE * age, age, f"stamps are {age:.3g} s old on arrival; 0.5 s more than twice that"),
        ):
            now = getattr(config.timeouts, name)  # not longer than it was, unless what was measured comes near it
            if seen:
                value = min(value, now) if 2 * seen < now else value
                yield Proposal(f"timeouts.{name}", value, f"{why}, {now:g} so far")
    if any(map(math.isinf, found.ends_after.values())):
        yield Proposal("guard.process", True, "the driver does not end a velocity by itself")
    speeds = [grip.speed for grip in found.grips.values() if math.isfinite(grip.speed)]
    if speeds:
        yield Proposal("gripper.max_speed", min(speeds), "as fast as its fingers were measured")


def _trail(joint: MovedJoint, one: JointResponse, config: Config) -> tuple[float, str]:
    """Return how far a joint may be from its command at the largest speed that the options allow it, and why."""
    limits, rate = config.limits, config.control.rate_hz if config.control.rate_hz > 0 else 5.0
    speeds = (
        limits.velocity_scale * joint.fastest,
        limits.max_joint_step * rate,
        limits.max_joint_velocity or math.inf,
    )
    far = abs(one.offset) + one.stick + one.delay * min(speeds)
    why = f"offset {abs(one.offset):.4f}, friction {one.stick:.4f}, {one.delay:.3f} s at up to {min(speeds):.3g}/s"
    return far, why


def options_file(proposed: Sequence[Proposal], told: Sequence[Remark], title: str) -> str:
    """Return the proposals as a parameter file, to be given after the robot's own."""
    lines = [f"# {title}", "# Give it after the robot's file: --config ROBOT.yaml --config THIS.yaml"]
    lines += [f"# Found: {what}: {found}; {fix}" for what, found, fix in told]
    lines += ["/**:", "  ros__parameters:"]
    for name, value, why in proposed:
        section, _, leaf = name.partition(".")
        if f"    {section}:" not in lines:
            lines.append(f"    {section}:")
        lines += [f"      # {why}", f"      {leaf}: {_rounded(value)}"]
    return "\n".join(lines) + "\n"


def _rounded(value: Any) -> str:
    return dump_yaml(float(f"{value:.3g}") if isinstance(value, float) else value)


def figures_of(found: Found, told: Sequence[Remark], proposed: Sequence[Proposal]) -> dict[str, Any]:
    """Return all figures as plain JSON values; what is infinite or unknown is null."""
    figures = {
        "surprise": surprise_of(found),
        "findings": [each._asdict() for each in told],
        "options": {name: value for name, value, _ in proposed},
        "joints": found.responses,
        "joint_states": found.states,
        "cameras": found.cameras,
        "silence": found.drifts,
        "velocity_ends_after_s": found.ends_after,
        "grippers": found.grips,
    }
    plain: dict[str, Any] = _plain(figures)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return _plain(asdict(value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_html(found: Found, told: Sequence[Remark], proposed: Sequence[Proposal], title: str) -> str:
    """Return the page: what was found, each joint's curves, the options."""
    surprise, curves = surprise_of(found), list[Any]()
    for joint, (commanded, measured, _) in found.motions.items():
        start = commanded.time[0]
        series = [
            charts.Series("commanded", commanded.time - start, commanded.position, 0, step=True),
            charts.Series("measured", measured.time - start, measured.position),
        ]
        curves.append(charts.lines(series, title=str(joint), x_label="s"))
    for arm, track in found.fingers.items():
        series = [charts.Series("measured", track.time - track.time[0], track.position)]
        curves.append(charts.lines(series, title=f"gripper of {arm}", x_label="s"))
    level = "bad" if surprise else "warn" if told else "good"
    headline = f"Stopped: {surprise}" if surprise else f"{len(told) or 'no'} findings"
    options = [(name, _rounded(value), why) for name, value, why in proposed]
    answers = [{"joint": str(joint), **asdict(one)} for joint, one in found.responses.items()]
    rhythms = [{"topic": topic, **asdict(one)} for topic, one in {**found.states, **found.cameras}.items()]
    tables = [page.mapped(rows, {name: name for name in rows[0]}) for rows in (answers, rhythms) if rows]
    body = [
        page.verdict(level, headline, [f"{what}: {text}; {fix}" for what, text, fix in told]),
        page.section("Curves", page.cards(curves), "Positions in radians or metres."),
        page.section("Options", page.table(("option", "value", "why"), options)),
        page.section(
            "Figures", tables, "Radians or metres, and seconds; docs/commissioning.md says what each means."
        ),
    ]
    return page.document(title, "Measured at low speed, one joint after the other.", body, "vla-ros commission")
