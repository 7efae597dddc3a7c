"""The ring between node and recorder: nothing is changed, lost uncounted, waited for or left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from vla_ros.config.record import RecordConfig
from vla_ros.record.ring import Ring
from vla_ros.record.selection import Selection
from vla_ros.record.topics import Recorded

TOPICS = ["/camera", "/event"]
READER = r"""
import sys
from vla_ros.record.ring import Ring

ring = Ring(int(sys.argv[1]), ["/camera", "/event"])
while True:
    for message in ring.read():
        print(f"{message.time} {len(message.data)} {set(message.data)}\n", end="", flush=True)
"""


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(1 << 20, TOPICS)
    yield made
    made.close()


def image(number: int, size: int = 100_000) -> Recorded:
    return Recorded(number, number + 1, "/camera", bytes([number % 256]) * size)


def test_messages_of_all_sizes_pass_unchanged_and_in_order_lap_after_lap(ring: Ring) -> None:
    reader = Ring(os.dup(ring.descriptor), TOPICS)
    sent, got = [], []
    for number in range(200):
        more = [image(number, 1 + number * 999), Recorded(number, 0, "/event", memoryview(b"words"))]
        ring.write(more)
        sent += more
        if number % 2:
            got += reader.read()
    assert got == sent
    assert not reader.take_dropped()
    assert os.fstat(ring.descriptor).st_nlink == 0, "nothing has a name that a killed process could leave"
    reader.close()


def test_a_full_ring_drops_and_counts_images_and_still_has_room_for_events(ring: Ring) -> None:
    began = time.monotonic()
    for number in range(1000):
        ring.write([image(number), Recorded(number, number, "/event", b"event")])
    assert time.monotonic() - began < 5.0, "it never waits for the reader"
    got = list(ring.read())
    images = [message.time for message in got if message.topic == "/camera"]
    assert images == list(range(len(images)))
    assert sum(message.topic == "/event" for message in got) == 1000
    assert ring.take_dropped() == {"/camera": 1000 - len(images)}
    assert not ring.take_dropped()
    ring.write([image(0)])
    assert list(ring.read()) == [image(0)]
    ring.write([image(0, 600_000)])
    assert ring.take_dropped() == {"/camera": 1}, "a message larger than half the ring"


@pytest.mark.parametrize("pause", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_is_killed_or_stopped_anywhere_holds_nobody_up(ring: Ring, pause: signal.Signals) -> None:
    command = [sys.executable, "-c", READER, str(ring.descriptor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[ring.descriptor]) as process:
        ring.write([image(0, 1)])
        assert process.stdout is not None
        assert process.stdout.readline() == "0 1 {0}\n"
        for number in range(100):
            ring.write([image(number, 50_000)])
            if number == 50:
                process.send_signal(pause)
            time.sleep(0.001)
        assert ring.take_dropped()
        if pause is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        process.kill()
        for line in process.stdout.read().splitlines():
            stamp, size, values = line.split(maxsplit=2)
            assert (int(size), values) == (50_000, f"{{{stamp}}}")


def test_only_drops_of_what_would_be_recorded_count() -> None:
    counts = {}
    for what in ("all", "last", "episodes"):
        selection = Selection(RecordConfig(what=what), ["/event"])
        selection.miss("/camera", 3)
        counts[what] = dict(selection.dropped)
    assert counts == {"all": {"/camera": 3}, "last": {"/camera": 3}, "episodes": {}}


def test_a_full_disk_does_not_end_a_reader(ring: Ring) -> None:
    """Numbers are not written with system calls, which a limit of the size of files would fail."""
    ring.write([image(1)])
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\nif 1:"
    code = READER.replace("while True:", full)
    command = [sys.executable, "-c", code, str(ring.descriptor)]
    done = subprocess.run(command, pass_fds=[ring.descriptor], check=True, capture_output=True, timeout=30)
    assert done.stdout == b"1 100000 {1}\n"
