"""Generated profiles have sizes for the frames and a syntax that the real libraries accept.

Regressions: a segment or pool smaller than one frame; Cyclone 0.10's syntax for Cyclone 11; outdated config/ files.
"""

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.config import Config
from vla_ros.config.loading import build
from vla_ros.errors import ConfigError
from vla_ros.graph.environment import dds_environment
from vla_ros.middleware.profiles import (
    DISTRIBUTIONS,
    MIN_SEGMENT,
    NAMES,
    FrameLoad,
    fastdds_xml,
    receive_buffer_bytes,
    roudi_toml,
    segment_bytes,
    select_profile,
)

FULL_HD = FrameLoad(1920, 1080)
CONFIG = Path(__file__).parents[2] / "config"
CYCLONE = "{https://cdds.io/config}"
FAST = "{http://www.eprosima.com}"

any_frames = st.builds(
    FrameLoad,
    width=st.integers(1, 7680),
    height=st.integers(1, 4320),
    cameras=st.integers(1, 8),
    bytes_per_pixel=st.integers(1, 4),
)


def number(root: ElementTree.Element, tag: str) -> int:
    found = root.find(f".//{tag}")
    assert found is not None
    return int(found.text or "")


def pools(text: str) -> list[tuple[int, int]]:
    return [(int(size), int(count)) for size, count in re.findall(r"size = (\d+)\ncount = (\d+)", text)]


def test_frames_come_from_the_configuration() -> None:
    values = {
        "camera.width": 1920,
        "camera.height": 1080,
        "camera.topics": ["/a", "/b"],
        "camera.keys": ["image", "wrist"],
    }
    frames = FrameLoad.of(build(values))
    assert frames == FrameLoad(1920, 1080, cameras=2)
    assert frames.image_bytes == 6_220_800
    assert FrameLoad.of(Config()) == FrameLoad(640, 480)


def test_a_frame_without_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="width: found 0, expected an integer from 1 to 16384"):
        FrameLoad(0, 480)


@given(any_frames)
def test_every_buffer_holds_the_frames(frames: FrameLoad) -> None:
    root = ElementTree.fromstring(fastdds_xml(frames).encode())
    segment = number(root, f"{FAST}segment_size")
    assert segment == segment_bytes(frames) >= max(MIN_SEGMENT, 2 * frames.message_bytes * frames.cameras)
    assert number(root, f"{FAST}maxMessageSize") > frames.image_bytes
    queue = number(root, f"{FAST}port_queue_capacity")
    assert queue * 65500 >= 2 * frames.message_bytes * frames.cameras, "the queue must hold two cut-up frames"
    assert number(root, f"{FAST}leaseAnnouncement/{FAST}nanosec") < 0.5e9, "two commanders must notice each other"
    assert number(root, f"{FAST}receiveBufferSize") == receive_buffer_bytes(frames) < 2**31
    chunks = pools(roudi_toml(frames))
    assert chunks == sorted(chunks), "RouDi refuses pools out of order"
    assert chunks[-1][0] > frames.message_bytes
    assert chunks[-1][0] % 32 == 0, "RouDi aligns chunks"
    assert chunks[-1][1] >= 16 * frames.cameras


def test_the_full_hd_segment_has_the_measured_size() -> None:
    assert 40e6 < segment_bytes(FULL_HD) < 70e6


@pytest.mark.parametrize("distro", ["humble", "jazzy", "kilted"])
def test_cyclone_0_10_has_the_shared_memory_element(distro: str) -> None:
    text = select_profile("iceoryx", FULL_HD, DISTRIBUTIONS[distro]).files["iceoryx_0.10.xml"]
    root = ElementTree.fromstring(text.encode())
    assert root.findtext(f".//{CYCLONE}SharedMemory/{CYCLONE}Enable") == "true"
    assert root.find(f".//{CYCLONE}PubSubMessageExchange") is None


def test_cyclone_11_has_the_exchange_plug_in() -> None:
    text = select_profile("iceoryx", FULL_HD, DISTRIBUTIONS["lyrical"]).files["iceoryx_11.xml"]
    root = ElementTree.fromstring(text.encode())
    exchange = root.find(f".//{CYCLONE}Interfaces/{CYCLONE}PubSubMessageExchange")
    assert exchange is not None
    assert exchange.get("library") == "psmx_iox"
    assert root.find(f".//{CYCLONE}SharedMemory") is None


_JOIN = """
import sys
from cyclonedds.domain import Domain, DomainParticipant
domain = Domain(147, sys.stdin.read())
DomainParticipant(147)
print("joined")
"""


def join_with_cyclone_11(text: str) -> subprocess.CompletedProcess[str]:
    """Load the text into the real library, in a new process because a process has one configuration."""
    command = [sys.executable, "-c", _JOIN]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("interface", ["", "lo"])
def test_cyclone_11_accepts_the_configuration(interface: str) -> None:
    pytest.importorskip("cyclonedds", reason="no wheel for this platform")
    text = select_profile("cyclonedds", FULL_HD, DISTRIBUTIONS["lyrical"], interface).files["cyclonedds_11.xml"]
    answer = join_with_cyclone_11(text)
    assert answer.stdout == "joined\n", answer.stderr
    assert "config" not in answer.stderr, "no unknown or deprecated element"


def test_the_embedded_participant_starts_with_the_configuration() -> None:
    """Its own settings come first; a limit below its own initial one was refused."""
    pytest.importorskip("cyclonedds", reason="no wheel for this platform")
    file = (CONFIG / "cyclonedds_11.xml").as_uri()
    answer = join_with_cyclone_11(dds_environment({"CYCLONEDDS_URI": file}).configuration())
    assert answer.stdout == "joined\n", answer.stderr


def test_cyclone_11_accepts_the_iceoryx_configuration() -> None:
    pytest.importorskip("cyclonedds", reason="no wheel for this platform")
    text = select_profile("iceoryx", FULL_HD, DISTRIBUTIONS["lyrical"]).files["iceoryx_11.xml"]
    answer = join_with_cyclone_11(text)
    assert "config:" not in answer.stderr, "no unknown or deprecated element"
    assert "psmx_iox" in answer.stderr, "the wheel has no such library, and got as far as loading it"


def test_roudi_accepts_the_pools(tmp_path: Path) -> None:
    roudi = shutil.which("iox-roudi")
    if roudi is None:
        pytest.skip("iox-roudi is not installed")
    from vla_ros.middleware.daemons import roudi_is_up

    if roudi_is_up():
        pytest.skip("another RouDi runs on this host, and there can be only one")
    config = tmp_path / "roudi.toml"
    config.write_text(roudi_toml(FrameLoad(640, 480)))
    with subprocess.Popen([roudi, "-c", config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        assert up.stdout is not None
        lines = []
        for line in up.stdout:
            lines.append(line)
            if "ready for clients" in line:
                break
        up.terminate()
        assert any("ready for clients" in line for line in lines), "".join(lines)


def test_zenoh_takes_the_pool_size_where_its_version_reads_it() -> None:
    jazzy = select_profile("zenoh", FULL_HD, DISTRIBUTIONS["jazzy"]).variables
    assert jazzy["ZENOH_CONFIG_OVERRIDE"] == "transport/shared_memory/enabled=true"
    assert int(jazzy["ZENOH_SHM_ALLOC_SIZE"]) == segment_bytes(FULL_HD)
    lyrical = select_profile("zenoh", FULL_HD, DISTRIBUTIONS["lyrical"]).variables
    assert lyrical["ZENOH_CONFIG_OVERRIDE"].endswith(f"pool_size={segment_bytes(FULL_HD)}")


@pytest.mark.parametrize("distro", DISTRIBUTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_files_in_config_are_what_the_code_generates(name: str, distro: str) -> None:
    regenerate = (
        f"vla-ros middleware {name} --distro {distro} --width 1920 --height 1080 --cameras 2 --write FOLDER"
    )
    for file, text in select_profile(name, FrameLoad(1920, 1080, 2), DISTRIBUTIONS[distro]).files.items():
        assert (CONFIG / file).read_text() == text, f"config/{file} is stale: {regenerate}"
