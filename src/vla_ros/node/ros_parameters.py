"""Declares the options as ROS parameters with description and range, reads and changes them.

Only :class:`~vla_ros.node.lifecycle_node.VlaPolicyNode` uses this module, which imports rclpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.exceptions import ParameterUninitializedException
from rclpy.parameter import Parameter

from vla_ros.config import Config
from vla_ros.config.checkpoints import checkpoint_options_of
from vla_ros.config.loading import Entry, build, entries, flatten, is_ros_own, unknown_option
from vla_ros.config.options import AUTO
from vla_ros.config.registry import owners
from vla_ros.config.tree import OF_AN_ARM
from vla_ros.errors import ConfigError

_TYPES = {bool: "BOOL", int: "INTEGER", float: "DOUBLE", str: "STRING"}  # Parameter.Type
_INT64_MAX = 2**63 - 1


def descriptor(entry: Entry) -> ParameterDescriptor:
    """Return what ``ros2 param describe`` shows: description, unit, choices, range, and whether it is live."""
    option = entry.option
    lowest = option.low if option.unset is None else option.unset
    constraints = f"{entry.expectation}; "
    constraints += "may change while running" if option.live else "set it before configure"
    made = ParameterDescriptor(
        name=entry.name,
        description=option.description,
        additional_constraints=constraints,
        # Accepts 5 for 5.0, and true for "true", which a static type would make rclpy refuse.
        dynamic_typing=entry.item_type is float or option.per_camera or "true" in option.choices,
    )
    if not entry.is_list and (option.low is not None or option.high is not None):
        if entry.item_type is float:
            low = -sys.float_info.max if lowest is None else float(lowest)
            high = sys.float_info.max if option.high is None else float(option.high)
            made.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
        elif entry.item_type is int:
            low_integer = -_INT64_MAX if lowest is None else int(lowest)
            high_integer = _INT64_MAX if option.high is None else int(option.high)
            made.integer_range = [IntegerRange(from_value=low_integer, to_value=high_integer, step=1)]
    return made


def declare(node: Any) -> Config:
    """Declare every option on an rclpy node; values come from parameter files, ``-p`` and the launch file.

    Raises ConfigError listing all names that are not options and all values of a wrong type or out of range.
    """
    given = getattr(node, "_parameter_overrides", {})  # rclpy has no public accessor
    # These determine which parameters exist, and their defaults.
    deciding: tuple[str, ...] = ("policy.name", "policy.checkpoint", "policy.base", "preset", "robot.arms")
    chosen = {name: _plain(override.value) for name, override in given.items()}
    policy = chosen.get("policy.name") or AUTO
    if policy != AUTO and checkpoint_options_of(policy) is None:  # a file's checkpoint may be another policy's
        deciding = tuple(name for name in deciding if name not in ("policy.checkpoint", "policy.base"))
    base = build({name: chosen[name] for name in deciding if chosen.get(name)}, complete=False)
    if base.robot.arms:  # shared options are the defaults of each arm's options
        deciding += tuple(OF_AN_ARM.values())
        base = build({name: chosen[name] for name in deciding if chosen.get(name)}, complete=False)
    # In rclpy an empty list has no type and therefore no value.
    lists = [name for name, entry in entries(base).items() if entry.is_list]
    empty: dict[str, Any] = {name: [] for name in lists if name in chosen and not chosen[name]}
    known, defaults = entries(base), {**flatten(base), **empty}
    problems = _unknown(given, base, node.get_logger().warning)
    problems += filter(None, [_declare_one(node, entry, defaults[name]) for name, entry in known.items()])
    if problems:
        raise ConfigError("\n".join(problems))
    return build({name: _value(node, name) for name in known}, base)


def _declare_one(node: Any, entry: Entry, default: Any) -> str:
    """Declare one option; return the problem with its value, or ""."""
    kind = Parameter.Type[_TYPES[entry.item_type] + "_ARRAY" * entry.is_list]
    described = descriptor(entry)
    try:
        node.declare_parameter(entry.name, default if described.dynamic_typing else kind, described)
    except Exception as error:  # rclpy has five unrelated classes for "this value is not allowed"
        return f"{entry.name}: {error}; expected {entry.expectation}"
    if _value(node, entry.name) in (None, []):
        # Without a type rclpy interprets an empty list as bytes.
        node.set_parameters([Parameter(entry.name, kind, default)])
    return ""


def _unknown(given: Mapping[str, Any], base: Config, warn: Callable[[str], Any]) -> list[str]:
    """Return overrides that are not options.

    rclpy ignores them, so a misspelt limit would not apply. A file may contain options of another policy,
    and values from files and single parameters cannot be told apart here: both are ignored with a warning.
    """
    problems = []
    for name in given:
        if name in entries(base) or is_ros_own(name):
            continue
        text = unknown_option(name, base, _plain(given[name].value))
        if name.startswith("policy.") and owners(name.removeprefix("policy.")):
            warn(f"ignored {text}")
        else:
            problems.append(text)
    return problems


def _value(node: Any, name: str) -> Any:
    try:
        value = node.get_parameter(name).value
    except ParameterUninitializedException:
        return None
    return list(value) if isinstance(value, (list, tuple)) or hasattr(value, "tolist") else value


def changed(base: Config, parameters: Sequence[Parameter], *, everything: bool) -> Config:
    """Apply the parameters to ``base``, all or none.

    Without ``everything``, for a configured node, only live options are allowed.
    """
    known = entries(base)
    wanted: Mapping[str, Any] = {
        parameter.name: _plain(parameter.value) for parameter in parameters if parameter.name in known
    }
    current = {"policy.name": base.policy.name, "preset": base.preset, "robot.arms": list(base.robot.arms)}
    for name, value in current.items():
        if wanted.get(name, value) != value:
            raise ConfigError(f"{name} determines which parameters exist: restart the node to change it")
    fixed = [name for name in wanted if not everything and not known[name].option.live]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} cannot change while the node is configured; unconfigure it first: "
            "ros2 lifecycle set NODE deactivate, then cleanup"
        )
    return build(wanted, base, live=True)


def _plain(value: Any) -> Any:
    return list(value) if hasattr(value, "tolist") else value
