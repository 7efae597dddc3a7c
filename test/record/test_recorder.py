"""A recorder whose disk, or whose own code, fails: it says so, and records again as soon as that is asked for."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vla_ros.config.record import RecordConfig
from vla_ros.graph import open_graph
from vla_ros.graph.node import Graph
from vla_ros.record import recorder as module
from vla_ros.record.bag import BagWriter
from vla_ros.record.recorder import Recorder
from vla_ros.record.ring import Ring
from vla_ros.record.selection import Selection
from vla_ros.record.topics import EVENT_QOS, Recorded, Topic
from vla_ros.telemetry.diagnostics import ERROR, OK
from vla_ros_lab.replay.bag import Bag

TOPIC = Topic("/a", "std_msgs/msg/String")
EVENTS = Topic("/events", "std_msgs/msg/String", EVENT_QOS)
CDR = b"\0\1\0\0\2\0\0\0a\0"


class Recording:
    """A recorder that gets a message every 20 ms."""

    def __init__(self, graph: Graph, folder: Path, what: str = "all") -> None:
        self.ring, self.sent = Ring.create(1 << 20, [TOPIC.name, EVENTS.name]), 0
        options = RecordConfig(what=what, folder=str(folder))
        self.recorder = Recorder(graph, "/vla_policy", options, [TOPIC, EVENTS], self.ring)
        self.graph = graph

    def say(self, text: bytes) -> None:
        """Publish a text as an event."""
        now, size = time.time_ns(), len(text) + 1
        self.ring.write([Recorded(now, now, EVENTS.name, b"\0\1\0\0" + size.to_bytes(4, "little") + text + b"\0")])

    def until(self, ready: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds

        def ended() -> bool:
            now = time.time_ns()
            self.ring.write([Recorded(now, now, TOPIC.name, CDR)])
            self.sent += 1
            return ready() or time.monotonic() > end

        self.graph.spin(ended, 0.02)
        assert ready(), self.recorder.report

    def values(self) -> dict[str, str]:
        return dict(self.recorder.report.values)

    def begin_another(self) -> None:
        """Do what ~/record with false and true does."""
        with self.recorder._lock:
            self.recorder._selection.end()
            self.recorder._selection.begin(time.time_ns())


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Recording]]:
    tag = f"<Tag>vla_ros_test_{os.getpid()}_{time.time_ns()}</Tag>"
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain><Discovery>{tag}</Discovery></Domain></CycloneDDS>")
    begun: list[Recording] = []

    def begin(what: str = "all") -> Recording:
        begun.append(Recording(graph, tmp_path, what))
        return begun[-1]

    with open_graph("dds") as graph:
        yield begin
        for each in begun:
            each.recorder.close()


def bags(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/metadata.yaml"))


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "unreadable"])
def test_whatever_lies_in_the_folder_does_not_keep_it_from_recording(
    recording: Callable[[], Recording], tmp_path: Path, what: str
) -> None:
    (tmp_path / "old").mkdir()
    found = tmp_path / "old" / "a.mcap"
    if what == "link":
        found.symlink_to(tmp_path / "gone")
    elif what == "pipe":
        os.mkfifo(found)
    elif what == "folder":
        found.mkdir()
    else:
        found.write_bytes(b"\x89MCAP0\r\n" + bytes(range(256)) * 9)
    each = recording()
    each.until(lambda: int(each.values()["messages"]) > 20)
    assert each.recorder.report.level == OK
    each.recorder.close()
    with Bag(Path(each.values()["bag"])) as read:
        assert len(list(read.records([TOPIC.name]))) == each.sent


@pytest.mark.parametrize("moved", [False, True])
def test_a_bag_that_is_removed_or_moved_is_reported_and_the_next_one_is_recorded(
    recording: Callable[[], Recording], tmp_path: Path, caplog: pytest.LogCaptureFixture, moved: bool
) -> None:
    each = recording()
    each.until(lambda: int(each.values()["messages"]) > 10)
    gone = Path(each.values()["bag"])
    if moved:
        gone.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(gone)
    each.until(lambda: each.recorder.report.level == ERROR)
    assert "removed or moved" in each.recorder.report.message
    lost = int(each.recorder.report.message.split("; ")[-1].split()[0])
    assert (lost >= 10) != moved, "what is not on the disk any more is lost"
    assert f"recorded {gone}" not in caplog.text
    each.begin_another()
    before = int(each.values()["messages"])
    each.until(lambda: each.recorder.report.level != ERROR and int(each.values()["messages"]) > before + 10)
    each.recorder.close()
    assert bags(tmp_path) == [Path(each.values()["bag"])]


def test_a_bag_that_cannot_be_finished_is_not_said_to_be_recorded(
    recording: Callable[[], Recording], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    each = recording()
    each.until(lambda: int(each.values()["messages"]) > 10)
    bag = Path(each.values()["bag"])
    (bag / "metadata.yaml").mkdir()
    each.begin_another()
    each.until(lambda: f"{bag} is not complete" in caplog.text)
    assert f"recorded {bag}" not in caplog.text


@pytest.mark.parametrize("place", ["unfinished", "take", "write", "repair"])
def test_whatever_the_thread_that_writes_raises_is_a_reason_and_it_goes_on(
    recording: Callable[[], Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner = {"unfinished": module, "repair": module, "take": Selection, "write": BagWriter}[place]
    sound, fails = getattr(owner, place), [True]

    def fail(*arguments: object) -> object:
        if fails:
            fails.clear()
            raise ZeroDivisionError("a mistake of ours")
        return sound(*arguments)

    if place == "repair":
        BagWriter(tmp_path / "killed", [TOPIC])._file._file.close()
    monkeypatch.setattr(owner, place, fail)
    each = recording()
    if place != "repair":  # that one leaves the bag of another recorder alone, and says so
        each.until(lambda: each.recorder.report.level == ERROR)
        assert "a mistake of ours" in each.recorder.report.message
    each.begin_another()
    before = int(each.values()["messages"])
    each.until(lambda: each.recorder.report.level != ERROR and int(each.values()["messages"]) > before + 10)


@pytest.mark.parametrize(
    "what", ["damaged", b"\xff", b"5", b"[1]", b'"a"', b"[" * 100_000, b'{"event": ["episode_start"]}']
)
def test_whatever_is_published_as_an_event_the_recorder_goes_on(
    recording: Callable[..., Recording], what: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    begun = recording("episodes")
    if isinstance(what, bytes):
        begun.say(what)
    else:
        begun.ring.write([Recorded(1, 1, EVENTS.name, b"\0\1\0\0\xff\xff\xff\x7f")])
    begun.say(b'{"event": "episode_start"}')
    begun.until(lambda: int(begun.values()["messages"]) > 10)
    assert begun.recorder.report.level == OK
    assert not [each.message for each in caplog.records if each.levelname == "ERROR"]


def test_a_recorder_of_a_node_that_is_not_there_says_so(
    recording, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited in silence, as one whose node was only idle."""
    graph = recording().graph
    recorder = Recorder(graph, "/nobody", RecordConfig(what="all", folder=str(tmp_path)), [TOPIC, EVENTS])
    until = time.monotonic() + 20.0
    with caplog.at_level("INFO"):
        graph.spin(lambda: "nothing came on any topic of /nobody" in caplog.text or time.monotonic() > until, 0.1)
    recorder.close()
    assert "nothing came on any topic of /nobody within 5 s; is it running" in caplog.text
