"""Sets up the middleware of a launch: environment, daemon, and a log line on whether it is active."""

import os
from pathlib import Path
from typing import Any

from launch.actions import LogInfo, OpaqueFunction, SetEnvironmentVariable, TimerAction, UnsetEnvironmentVariable

from launch import LaunchContext
from vla_ros.errors import VlaRosError
from vla_ros.launching.arguments import value
from vla_ros.middleware.checks import check_profile
from vla_ros.middleware.daemons import roudi_is_up, start_detached, zenoh_router_is_up
from vla_ros.middleware.profiles import (
    ALL_VARIABLES,
    FrameLoad,
    Profile,
    default_folder,
    select_profile,
    sourced_distribution,
    write_profile,
)


def middleware(context: LaunchContext, frames: FrameLoad) -> list[Any]:
    """Set the environment of later actions, start the daemon, and log whether the profile is active.

    Raises RuntimeError if the RMW or the daemon that it needs is not installed, or the distribution is unknown; and
    later if RouDi, for which every process waits, does not start.
    """
    name = value(context, "middleware") or "default"
    try:
        profile = select_profile(name, frames, sourced_distribution(), value(context, "interface"))
        folder = default_folder(profile)
        if profile.files:
            write_profile(profile, folder)
    except VlaRosError as error:
        raise RuntimeError(str(error)) from None
    chosen = profile.environment(folder)
    report = check_profile(name, frames, profile.distribution, {**os.environ, **chosen})
    if report.fatal:
        raise RuntimeError(str(report))
    actions: list[Any] = []
    if chosen:
        actions += [UnsetEnvironmentVariable(variable) for variable in ALL_VARIABLES if variable not in chosen]
        actions += [SetEnvironmentVariable(variable, text) for variable, text in chosen.items()]
    return actions + _daemon(profile, folder)


def _daemon(profile: Profile, folder: Path) -> list[Any]:
    up = {"iceoryx": roudi_is_up, "zenoh": zenoh_router_is_up}.get(profile.name)
    if up is None or up():
        return [_say_when(profile, lambda: True, 0)]

    def start(context: LaunchContext) -> list[Any]:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{profile.name}.log"
        try:
            pid = start_detached(profile.command(folder), log)
        except OSError as error:  # zenoh's router, without which nodes of this host do not find each other
            return [LogInfo(msg=f"middleware {profile.name}: its daemon does not start: {error}")]
        name = profile.daemon[0] if profile.name == "iceoryx" else profile.daemon[-1]
        started = f"started {name}, pid {pid}, log {log}; it keeps running, one per host"
        return [LogInfo(msg=f"middleware {profile.name}: {started}")]

    # An action, so that rmw_zenohd reads the environment that was just set.
    return [OpaqueFunction(function=start), _say_when(profile, up, 20)]


def _say(profile: Profile) -> LogInfo:
    return LogInfo(msg=str(check_profile(profile.name, profile.frames, profile.distribution, os.environ)))


def _say_when(profile: Profile, up: Any, attempts: int) -> OpaqueFunction:
    """Poll four times a second until the daemon is up, at most ``attempts`` times; then log the check."""

    def look(context: LaunchContext) -> list[Any]:
        if attempts == 0 and profile.name == "iceoryx" and not up():
            log = default_folder(profile) / f"{profile.name}.log"
            raise RuntimeError(f"middleware iceoryx: RouDi did not start within 5 s, see {log}; no process can run")
        if up() or attempts == 0:
            return [_say(profile)]
        return [TimerAction(period=0.25, actions=[_say_when(profile, up, attempts - 1)])]

    return OpaqueFunction(function=look)
