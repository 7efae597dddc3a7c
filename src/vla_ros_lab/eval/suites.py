"""Opens what is to be scored: the simulated table, or benchmarks of vla-eval in a process of their own."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_ros.config import Config, load
from vla_ros.config.control import ENVIRONMENT
from vla_ros.config.loading import parse_assignment
from vla_ros.contract import benchmark as benchmarks
from vla_ros.contract.binding import with_rate
from vla_ros.contract.features import complete_spec
from vla_ros.contract.gripper import gripper_ends
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.policies.base import checkpoint_options, create
from vla_ros_lab.eval.arguments import CONTROLS, plan_demo
from vla_ros_lab.eval.arguments import parse as parse_demo
from vla_ros_lab.eval.environment import BenchmarkEnvironment, Case
from vla_ros_lab.eval.process import BenchmarkError, BenchmarkProcess
from vla_ros_lab.eval.protocols import Protocol, find_protocol
from vla_ros_lab.eval.scene import make_table
from vla_ros_lab.sim.environment import Environment

_APART = 0.5  # ms between a step of the environment and the commands for the next one, on the simulated clock
_TRIES = 3  # episodes that may fail to begin before the first one that does

Choose = Callable[[Sequence[Case]], Sequence[Case]]
"""Returns the cases to run; raises ConfigError if there are none."""


@dataclass
class Suite:
    """A benchmark that is open, and the options of the node that fit it."""

    config: Config  # options of the node
    environment: Environment
    cases: Sequence[Case]  # those that were chosen
    max_steps: Sequence[int]  # for each of ``cases``
    keys: Sequence[int]  # for each of ``cases``: the argument of :meth:`Environment.reset`
    close: Callable[[], None]
    # Position in ``cases`` to why it cannot be run, known before it is.
    impossible: Mapping[int, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def open_suite(arguments: argparse.Namespace, choose: Choose) -> Suite:
    """Open ``arguments.benchmark``; raises ConfigError if it and the policy do not fit together."""
    return _open_table(arguments, choose) if arguments.benchmark == "table" else _open_benchmark(arguments, choose)


def _timing(arguments: argparse.Namespace) -> list[str]:
    """Return the options of the node that ``--sync``, ``--live``, ``--delay-ms`` and ``--schedule`` mean."""
    if arguments.live is None:
        return ["control.schedule:=sync"]
    schedule = [f"control.schedule:={arguments.schedule}"] if arguments.schedule else []
    # A command at the very time of a step of the environment would come before or after it by rounding.
    delay = 0.0 if arguments.clock == "wall" else arguments.delay_ms + _APART
    return [f"control.rate_hz:={arguments.live:g}", f"control.inject_delay_ms:={delay:g}", *schedule]


_TABLE = ("objects", *CONTROLS)
"""Options of ``vla-ros demo`` that are parameters of the table."""


def _open_table(arguments: argparse.Namespace, choose: Choose) -> Suite:
    demo = parse_demo("--simulated-time")
    for name, value in map(_parameter, arguments.benchmark_param):
        if name not in _TABLE:
            raise ConfigError(
                f"--benchmark-param: found {name!r}, expected one of {', '.join(_TABLE)} for the table"
            )
        setattr(demo, name, value)
    demo.checkpoint, demo.policy, demo.config = arguments.checkpoint, arguments.policy, arguments.config
    demo.param = [*_timing(arguments), *arguments.param]
    config = plan_demo(demo).config
    first = arguments.seed or 0
    cases = choose([Case("table", seed) for seed in range(first, first + (arguments.episodes or 5))])
    table = make_table(demo, config)
    steps = arguments.max_steps or round(8 / table.step_seconds)
    states = [case.state for case in cases]
    return Suite(config, table, cases, [steps] * len(cases), states, table.close)


def _open_benchmark(arguments: argparse.Namespace, choose: Choose) -> Suite:
    options = checkpoint_options(arguments.policy, arguments.checkpoint, arguments.config)
    protocol = find_protocol(arguments.benchmark) or Protocol(arguments.benchmark)
    if protocol.rate_hz:
        options.append(f"features.rate_hz:={protocol.rate_hz:g}")
    if protocol.execute_steps:
        options.append(f"control.execute_steps:={protocol.execute_steps}")
    name = protocol.benchmark
    is_file = Path(name).suffix in (".yaml", ".yml")
    if is_file and not Path(name).exists():
        raise ConfigError(f"{name}: no such file; expected a configuration of vla-eval, module:Class or table")
    if not is_file and ":" not in name:
        expected = "table, libero_spatial and its like, a configuration of vla-eval, or module:Class"
        raise ConfigError(f"found benchmark '{name}', expected {expected}")
    base = load(arguments.config, [*options, *arguments.param])
    spec = complete_spec(spec_of(base), base)
    package, known = benchmarks.benchmark_of(name)
    executed = benchmarks.fitting(spec, known, name) if known else ()
    params = {**protocol.params, **dict(map(_parameter, arguments.benchmark_param))}
    if arguments.seed is not None:
        params["seed"] = arguments.seed
    opening = {
        "do": "open",
        "file": str(Path(name).resolve()) if is_file else "",
        "benchmark": name,
        "params": params,
        "observation_params": benchmarks.observation_params(
            spec, package or "libero" * is_file, base.policy.name, executed
        ),
    }
    process = BenchmarkProcess(arguments.python, opening, arguments.step_timeout)
    try:
        try:
            stated = process.start()["benchmarks"]
        except BenchmarkError as error:
            raise ConfigError(f"{name} cannot be opened: {error}") from None
        cases = choose(_cases(stated, arguments.episodes or protocol.episodes))
        environment = BenchmarkEnvironment(process, cases)
        impossible = _missing(cases, stated)
        _probe(environment, len(cases), impossible)
        derived, notes = fit_benchmark(base, spec, environment, stated)
        config = load(arguments.config, [*options, *derived, *_timing(arguments), *arguments.param])
        environment.step_seconds = 1 / with_rate(config, spec).control.rate_hz
    except BaseException:
        process.close()
        raise
    most = arguments.max_steps or protocol.max_steps
    steps = [most or stated[case.entry]["max_steps"] for case in cases]
    notes += [f"not as published: {protocol.differs}"] if protocol.differs else []
    keys = range(len(cases))
    return Suite(config, environment, cases, steps, keys, environment.close, impossible, notes)


def _parameter(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--benchmark-param: found {text!r}, expected NAME=VALUE")
    return name, parse_assignment(f"x:={value}")[1]


def spec_of(base: Config) -> PolicySpec:
    """Return a policy's spec; a policy that cannot describe it beforehand, such as a server's, is loaded."""
    policy = create(base)
    try:
        spec = policy.describe()
        if spec.dimension:
            return spec
    except ConfigError:
        raise
    except VlaRosError:
        pass
    policy.load()
    try:
        return policy.spec
    finally:
        policy.close()


def _cases(stated: Sequence[Mapping[str, Any]], episodes: int | None) -> list[Case]:
    """Return all episodes, task by task."""
    found = []
    for entry, one in enumerate(stated):
        before = f"{one['name']}: " if len(stated) > 1 else ""
        for index, task in enumerate(one["tasks"]):
            found += [Case(before + task, state, entry, index) for state in range(episodes or one["episodes"])]
    return found


def _missing(cases: Sequence[Case], stated: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the positions of the cases whose initial state does not exist, and why they cannot be run."""
    most = [(position, case.state, stated[case.entry]["most_episodes"]) for position, case in enumerate(cases)]
    lacking = [(position, state, count) for position, state, count in most if count is not None and state >= count]
    return {at: f"initial state {state} does not exist: the task has {count}" for at, state, count in lacking}


def _probe(environment: BenchmarkEnvironment, count: int, impossible: dict[int, str]) -> None:
    """Begin the first case that can be begun, and note why those before it cannot; ConfigError after three."""
    errors: list[str] = []
    for position in range(count):
        if position in impossible:
            continue
        try:
            environment.probe(position)
            return
        except BenchmarkError as error:
            impossible[position] = str(error)
            errors.append(str(error))
            if len(errors) == _TRIES:
                break
    raise ConfigError(f"no episode can be begun: {(errors or list(impossible.values()))[-1]}")


def fit_benchmark(
    base: Config, spec: PolicySpec, environment: BenchmarkEnvironment, stated: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Return the options with which the node drives a benchmark as it is, and notes on what was assumed.

    The policy's images (``camera.keys``, and what ``features.images`` names) and the benchmark's are paired by
    ``contract.benchmark.pair_images``. Its state is the vector ``states`` or ``state``. Raises ConfigError, which
    names both sides, if they do not fit.
    """
    first, notes, sent = stated[0], list[str](), ", ".join(environment.sizes)
    own = [one.source for one in spec.images if one.source in environment.sizes]
    cameras = list(dict.fromkeys([*base.camera.keys, *own]))
    pairs = benchmarks.pair_images(cameras, tuple(environment.sizes))
    if lacking := [one.source for one in spec.images if one.required and one.source not in pairs]:
        raise ConfigError(f"the policy needs the images {', '.join(lacking)}, but {first['name']} sends {sent}")
    notes.append(f"images: {', '.join(f'{key} = {name}' for key, name in pairs.items())} (of {sent})")
    keys = [key for key in cameras if key in pairs]
    sizes = [environment.sizes[pairs[key]] for key in keys]
    options: dict[str, Any] = {
        "camera.keys": keys,
        "camera.topics": [f"/{pairs[key]}/image" for key in keys],
        "camera.orientation": ["none"],
        "camera.width": [width for _, width in sizes],
        "camera.height": [height for height, _ in sizes],
        "robot.urdf": "",
        "robot.joint_names": [],
        "robot.gripper_joint_names": [],
        "robot.home": [],
        "control.output": ENVIRONMENT,
        "control.armed": True,
        "control.delta_form": "goal",
        "gripper.max_speed": 0.0,
        "robot.state_topics": [f"{name}=/{name}" for name in environment.vectors],
    }
    vectors = environment.vectors
    vector = next((name for name in ("states", "state", *vectors) if name in vectors), "")
    counts = [state.size for state in spec.state]
    names = [state.key for state in spec.state]
    if len(names) > 1 and all(counts) and vectors.get(vector) == sum(counts):
        names, counts = [" + ".join(names)], [sum(counts)]  # the vector has them all, in the policy's order
    for name, size in zip(names, counts, strict=True):
        if not vector or size not in (0, vectors[vector]):
            size_text = f" of {size} numbers" if size else ""
            found = ", ".join(f"{each} of {length}" for each, length in vectors.items()) or "none"
            raise ConfigError(f"the policy's state '{name}'{size_text}: {first['name']} sends the vectors {found}")
        notes.append(f"state: {name} = {vector}")
    if names:
        options["features.state"] = [f"{name} = topic.{vector}[{vectors[vector]}]" for name in names]
    options |= _action(base, spec, first, notes)
    return [f"{name}:={json.dumps(value)}" for name, value in options.items()], notes


def _action(base: Config, spec: PolicySpec, stated: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the options for the benchmark's form of a rotation and its values for a closed and an open gripper."""
    options: dict[str, Any] = {}
    _, known = benchmarks.benchmark_of(stated["config"]["benchmark"])
    gripper = next((part for part in spec.action if part.quantity == "gripper"), None)
    if known is not None:
        parts = {part.quantity: part for part in benchmarks.fitting(spec, known, stated["name"])}
        form = parts["tip_delta"].form if "tip_delta" in parts else ""
        ends = parts["gripper"].range if "gripper" in parts else None
    else:
        action_spec = stated["action_spec"]
        sizes = [part["dims"] for part in action_spec.values()]
        if all(sizes) and sizes and spec.dimension not in (0, sum(sizes)):
            takes = " + ".join(f"{name} ({part['format']}, {part['dims']})" for name, part in action_spec.items())
            ours = f"{spec.dimension} numbers ({' + '.join(map(str, spec.action)) or 'numbers'})"
            raise ConfigError(f"the policy's actions have {ours}, but {stated['name']} takes {takes}")
        form = benchmarks.ROTATIONS.get(str(action_spec.get("rotation", {}).get("format")), "")
        ends = benchmarks.GRIPPERS.get(str(action_spec.get("gripper", {}).get("format")))
    if form and any(part.quantity == "tip_delta" for part in spec.action):
        options["control.rotation"] = form
    if gripper is not None:
        own = gripper_ends(gripper, base.gripper)
        closed, opened = ends or own
        options |= {"gripper.closed_position": closed, "gripper.open_position": opened}
        options |= {"gripper.closed_value": own[0], "gripper.open_value": own[1]}
        how = "passed on unchanged" if ends in (None, own) else f"becomes {closed:g} closed, {opened:g} open"
        notes.append(f"gripper: {own[0]:g} closed, {own[1]:g} open, {how}")
    return options
