"""Checks of middleware profiles: each missing setting is named with its fix.

Regressions: a stale RouDi socket taken for RouDi; a profile for smaller frames; an RMW that is not installed.
"""

import socket
from pathlib import Path

import pytest

from vla_ros.errors import VlaRosError
from vla_ros.middleware import checks, daemons
from vla_ros.middleware.checks import Report, check_profile, uses_iceoryx
from vla_ros.middleware.daemons import RoudiWatch, roudi_is_up, roudi_pools, wait_for_roudi
from vla_ros.middleware.profiles import DISTRIBUTIONS, RMW_OF, FrameLoad, select_profile, write_profile

JAZZY = DISTRIBUTIONS["jazzy"]
FULL_HD = FrameLoad(1920, 1080)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with all RMWs installed, large buffers and no daemon."""
    index = tmp_path / "ros/share/ament_index/resource_index/rmw_typesupport"
    index.mkdir(parents=True)
    for rmw in RMW_OF.values():
        (index / rmw).touch()
    limit = tmp_path / "rmem_max"
    limit.write_text("33554432\n")
    monkeypatch.setattr(checks, "RECEIVE_MAX", limit)
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(daemons, "ROUDI_SOCKET", tmp_path / "roudi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(daemons, "ZENOH_ROUTER", free.getsockname())
    return tmp_path


def environment(host: Path, name: str, frames: FrameLoad = FULL_HD) -> dict[str, str]:
    profile = select_profile(name, frames, JAZZY)
    write_profile(profile, host / "files")
    return {"AMENT_PREFIX_PATH": str(host / "ros"), **profile.environment(host / "files")}


def only_problem(report: Report) -> str:
    assert len(report.problems) == 1, str(report)
    return str(report)


@pytest.mark.parametrize("name", ["fastdds", "cyclonedds"])
def test_a_written_profile_is_active(host: Path, name: str) -> None:
    report = check_profile(name, FULL_HD, JAZZY, environment(host, name))
    assert report.active, str(report)
    assert str(report).startswith(f"middleware {name}: active: {RMW_OF[name]} for 1 camera of 1920x1080")


def test_an_rmw_that_is_not_installed_is_fatal_and_names_its_package(host: Path) -> None:
    variables = environment(host, "zenoh")
    (host / "ros/share/ament_index/resource_index/rmw_typesupport/rmw_zenoh_cpp").unlink()
    report = check_profile("zenoh", FULL_HD, JAZZY, variables)
    assert report.fatal
    assert "sudo apt-get install ros-jazzy-rmw-zenoh-cpp" in only_problem(report)


def test_another_rmw_in_the_environment_is_named(host: Path) -> None:
    variables = environment(host, "fastdds") | {"RMW_IMPLEMENTATION": "rmw_cyclonedds_cpp"}
    assert "RMW_IMPLEMENTATION is rmw_cyclonedds_cpp, not rmw_fastrtps_cpp" in only_problem(
        check_profile("fastdds", FULL_HD, JAZZY, variables)
    )


def test_a_segment_for_smaller_frames_is_too_small(host: Path) -> None:
    variables = environment(host, "fastdds", FrameLoad(640, 480))
    big = FrameLoad(3840, 2160)
    text = only_problem(check_profile("fastdds", big, JAZZY, variables))
    assert "has a segment of 16,777,216 B; two frames of each camera are" in text
    assert "vla-ros middleware fastdds --width 3840 --height 2160" in text


def test_the_default_reports_frames_that_stock_settings_lose(host: Path) -> None:
    variables = {"AMENT_PREFIX_PATH": str(host / "ros")}
    assert "middleware:=fastdds" in only_problem(check_profile("default", FULL_HD, JAZZY, variables))
    variables["RMW_IMPLEMENTATION"] = "rmw_cyclonedds_cpp"
    text = only_problem(check_profile("default", FULL_HD, JAZZY, variables))
    assert "middleware:=cyclonedds for a launch file, vla-ros middleware cyclonedds --write FOLDER" in text


def test_a_small_receive_buffer_names_the_sysctl(host: Path) -> None:
    (host / "rmem_max").write_text("212992\n")
    text = only_problem(check_profile("cyclonedds", FULL_HD, JAZZY, environment(host, "cyclonedds")))
    assert "net.core.rmem_max is 212,992 B" in text
    assert "sudo sysctl -w net.core.rmem_max=12582912" in text


def test_a_missing_profile_file_is_named(host: Path) -> None:
    variables = environment(host, "cyclonedds")
    (host / "files/cyclonedds_0.10.xml").unlink()
    assert "cyclonedds_0.10.xml cannot be read" in str(check_profile("cyclonedds", FULL_HD, JAZZY, variables))


def test_a_missing_or_stopped_roudi_is_named(host: Path) -> None:
    variables = environment(host, "iceoryx")
    report = check_profile("iceoryx", FULL_HD, JAZZY, variables | {"PATH": str(host)})
    nothing = only_problem(report)
    assert report.fatal, "every process would wait for it"
    assert "iox-roudi is not installed" in nothing
    (host / "iox-roudi").touch(mode=0o755)
    stopped = only_problem(check_profile("iceoryx", FULL_HD, JAZZY, variables | {"PATH": str(host)}))
    assert "RouDi is not running" in stopped


def test_iceoryx_of_lyrical_is_refused_with_its_fault(host: Path) -> None:
    report = check_profile("iceoryx", FULL_HD, DISTRIBUTIONS["lyrical"], environment(host, "iceoryx"))
    assert report.fatal
    assert "issue 585" in only_problem(report)
    assert "middleware:=cyclonedds" in str(report)


def test_a_listening_roudi_is_up_but_a_stale_socket_is_not(host: Path) -> None:
    assert not roudi_is_up()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as roudi:
        roudi.bind(str(host / "roudi"))
        assert roudi_is_up()
        assert check_profile("iceoryx", FULL_HD, JAZZY, environment(host, "iceoryx")).active
    assert (host / "roudi").exists()
    assert not roudi_is_up()


def process(host: Path, command: list[str]) -> Path:
    """A /proc with one process."""
    entry = host / "proc/4711"
    entry.mkdir(parents=True)
    (entry / "cmdline").write_text("\0".join([*command, ""]))
    (entry / "cwd").symlink_to(host)
    return host / "proc"


@pytest.mark.parametrize(("name", "uses"), [("iceoryx", True), ("cyclonedds", False), ("fastdds", False)])
def test_processes_that_depend_on_roudi(host: Path, name: str, uses: bool) -> None:
    assert uses_iceoryx(environment(host, name)) == uses


def test_waiting_for_roudi_ends_when_it_is_up_or_on_request(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    looks = iter([False, False, True])
    assert not wait_for_roudi(lambda: next(looks), logged.append)
    assert len(logged) == 1
    assert "iox-roudi -m off -c roudi.toml" in logged[0]
    answers = iter([False, True])
    monkeypatch.setattr(daemons, "roudi_is_up", lambda: next(answers))
    assert wait_for_roudi(lambda: False, logged.append)


def test_the_wait_for_roudi_has_a_bound(host: Path) -> None:
    seconds = iter([0.0, 59.0, 61.0])
    with pytest.raises(VlaRosError, match=r"waited 60 s for RouDi: .* start it: iox-roudi"):
        wait_for_roudi(lambda: False, lambda text: None, lambda: next(seconds))


def test_a_restarted_roudi_is_still_reported_as_ended() -> None:
    up = iter([True, True, False, True])
    watch = RoudiWatch(lambda: next(up))
    assert [watch.check()[:15] for _ in range(5)] == ["", "", *["RouDi has ended"] * 3]


def test_a_roudi_that_was_replaced_between_two_looks_is_reported(tmp_path: Path) -> None:
    memory, maps = tmp_path / "iceoryx_mgmt", tmp_path / "maps"
    memory.touch()
    inode = memory.stat().st_ino
    maps.write_text(f"7f00-7f01 rw-s 0 00:1b {inode}  {memory}\n7f02-7f03 r-xp 0 00:1b 7 /lib/x\n")
    watch = RoudiWatch(lambda: True, memory, maps)
    assert watch.check() == ""
    other = tmp_path / "other"
    other.touch()
    other.rename(memory)
    assert watch.check().startswith("RouDi has ended or was restarted")
    memory.unlink()
    assert RoudiWatch(lambda: True, memory, maps).check()


def test_the_pools_of_a_running_roudi_are_read(host: Path) -> None:
    (host / "own.toml").write_text("[[segment.mempool]]\nsize = 128\ncount = 9\n[[segment.mempool]]\nsize = 4096\n")
    assert roudi_pools(process(host, ["/usr/bin/iox-roudi", "-c", "own.toml"])) == [128, 4096]


def test_a_roudi_with_small_pools_is_a_problem(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "roudi_is_up", lambda: True)
    monkeypatch.setattr(checks, "roudi_pools", lambda: [128, 4194304])
    text = only_problem(check_profile("iceoryx", FULL_HD, JAZZY, environment(host, "iceoryx")))
    assert "RouDi's largest chunks are 4,194,304 B and a frame needs 6,225,920 B" in text


def test_zenoh_needs_its_router(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(host, "zenoh")
    assert "ros2 run rmw_zenoh_cpp rmw_zenohd" in only_problem(check_profile("zenoh", FULL_HD, JAZZY, variables))
    with socket.create_server(("127.0.0.1", 0)) as router:
        monkeypatch.setattr(daemons, "ZENOH_ROUTER", router.getsockname())
        assert check_profile("zenoh", FULL_HD, JAZZY, variables).active


def test_the_default_checks_the_users_settings(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = environment(host, "fastdds")
    assert "shared-memory segment" in str(check_profile("default", FULL_HD, JAZZY, fast))
    shared = environment(host, "iceoryx")
    assert "RouDi is not running" in str(
        check_profile("default", FULL_HD, JAZZY, shared | {"PATH": _with_roudi(host)})
    )


def _with_roudi(host: Path) -> str:
    (host / "iox-roudi").touch(mode=0o755)
    return str(host)


@pytest.mark.parametrize("rmw", ["rmw_fastrtps_cpp", "rmw_cyclonedds_cpp"])
def test_small_frames_need_no_profile(host: Path, rmw: str) -> None:
    variables = {"AMENT_PREFIX_PATH": str(host / "ros"), "RMW_IMPLEMENTATION": rmw}
    assert check_profile("default", FrameLoad(160, 120), JAZZY, variables).active
    assert not check_profile("default", FrameLoad(1280, 720), JAZZY, variables).active
