"""Selection by name and distribution, written files, shells that source them, and ``vla-ros middleware``."""

import subprocess
from pathlib import Path

import pytest

from vla_ros.cli.main import main
from vla_ros.errors import ConfigError
from vla_ros.middleware.profiles import (
    DISTRIBUTIONS,
    NAMES,
    FrameLoad,
    default_folder,
    select_profile,
    sourced_distribution,
    write_profile,
)

FULL_HD = FrameLoad(1920, 1080)
JAZZY = DISTRIBUTIONS["jazzy"]


def test_default_changes_nothing(tmp_path: Path) -> None:
    profile = select_profile("default", FULL_HD, JAZZY)
    assert profile.environment(tmp_path) == {}
    assert profile.shell(tmp_path).startswith("#")
    assert "unset" not in profile.shell(tmp_path)


def test_the_error_for_an_unknown_name_lists_all_names() -> None:
    with pytest.raises(ConfigError, match="found 'dds', expected one of default, fastdds, cyclonedds"):
        select_profile("dds", FULL_HD, JAZZY)


@pytest.mark.parametrize(
    ("distro", "variable"),
    [
        ("humble", "FASTRTPS_DEFAULT_PROFILES_FILE"),
        ("jazzy", "FASTRTPS_DEFAULT_PROFILES_FILE"),
        ("lyrical", "FASTDDS_DEFAULT_PROFILES_FILE"),
    ],
)
def test_fast_dds_reads_the_variable_of_its_version(distro: str, variable: str, tmp_path: Path) -> None:
    environment = select_profile("fastdds", FULL_HD, DISTRIBUTIONS[distro]).environment(tmp_path)
    assert environment == {"RMW_IMPLEMENTATION": "rmw_fastrtps_cpp", variable: str(tmp_path / "fastdds.xml")}


def test_only_iceoryx_and_zenoh_need_a_daemon(tmp_path: Path) -> None:
    needed = {name: select_profile(name, FULL_HD, JAZZY).command(tmp_path) for name in NAMES}
    assert needed.pop("iceoryx") == ["iox-roudi", "-m", "off", "-c", str(tmp_path / "roudi.toml")]
    assert needed.pop("zenoh")[-1] == "rmw_zenohd"
    assert not any(needed.values())


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_shell_that_sources_the_file_has_the_variables(shell: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    profile = select_profile(name, FULL_HD, JAZZY)
    source = write_profile(profile, folder)
    script = f'. "{source}"; env'
    stale = {"PATH": "/usr/bin:/bin", "CYCLONEDDS_URI": "stale", "FASTDDS_DEFAULT_PROFILES_FILE": "stale"}
    answer = subprocess.run(
        [shell, "-c", script], capture_output=True, text=True, env=stale, timeout=20, check=True
    )
    found = dict(line.split("=", 1) for line in answer.stdout.splitlines())
    assert profile.environment(folder).items() <= found.items()
    assert "stale" not in answer.stdout
    for file in profile.files:
        assert (folder / file).exists()


def test_files_of_different_frames_do_not_overwrite_each_other() -> None:
    environment = {"ROS_HOME": "/home/me/.ros"}
    folders = {default_folder(select_profile("fastdds", FrameLoad(w, 480), JAZZY), environment) for w in (640, 320)}
    assert len(folders) == 2
    assert all(str(folder).startswith("/home/me/.ros/vla_ros/middleware/jazzy/") for folder in folders)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: cannot write the middleware profile"):
        write_profile(select_profile("fastdds", FULL_HD, JAZZY), tmp_path / "file")


def test_the_sourced_distribution_decides() -> None:
    assert sourced_distribution({"ROS_DISTRO": "lyrical"}).cyclone == "11"
    assert sourced_distribution({}, fallback="jazzy").name == "jazzy"
    with pytest.raises(ConfigError, match="no ROS 2 is sourced"):
        sourced_distribution({})
    with pytest.raises(ConfigError, match="'foxy': middleware profiles are known for humble, jazzy"):
        sourced_distribution({"ROS_DISTRO": "foxy"})


def test_it_prints_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["middleware", "fastdds", "--width", "1920", "--height", "1080", "--distro", "lyrical"]) == 0
    printed = capsys.readouterr().out
    assert "<segment_size>50331648</segment_size>" in printed
    assert "export FASTDDS_DEFAULT_PROFILES_FILE=" in printed


def test_the_frames_come_from_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["middleware", "iceoryx", "--distro", "jazzy", "-p", "camera.width:=800"]) == 0
    assert "1 camera of 800x480" in capsys.readouterr().out


def test_write_prints_the_file_to_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["middleware", "iceoryx", "--distro", "humble", "--write", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"source {tmp_path}/iceoryx.sh\n"
    assert {file.name for file in tmp_path.iterdir()} == {"iceoryx.sh", "iceoryx_0.10.xml", "roudi.toml"}


def test_check_returns_1_and_prints_one_line_if_not_in_force(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMENT_PREFIX_PATH", "")
    monkeypatch.delenv("RMW_IMPLEMENTATION", raising=False)
    assert main(["middleware", "fastdds", "--distro", "jazzy", "--check"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "rmw_fastrtps_cpp is not installed" in printed
