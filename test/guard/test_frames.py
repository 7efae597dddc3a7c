"""Frames and channel: what was not sent is never accepted."""

import os
import select

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.guard.channel import ChannelError, socket_pair
from vla_ros.guard.frames import (
    FRAME_BYTES,
    MOST_VALUES,
    PUBLISHER_BYTES,
    DamagedError,
    GuardFrame,
    Kind,
    packet_of,
    read_packet,
)
from vla_ros.process import SharedText

KINDS = [kind for kind in Kind if kind is not Kind.OPTIONS]
INT64 = st.integers(-(2**63), 2**63 - 1)
FRAMES = st.builds(
    GuardFrame,
    kind=st.sampled_from(KINDS),
    counter=st.integers(1, 2**64 - 1),
    time=INT64,
    arm=st.integers(0, 255),
    values=st.lists(st.floats(allow_nan=False), max_size=MOST_VALUES).map(np.array),
    lifetime=INT64,
    duration=st.floats(allow_nan=False),
    stamp=INT64,
    source=st.integers(0, 255),
    joints=INT64,
    publisher=st.binary(min_size=PUBLISHER_BYTES, max_size=PUBLISHER_BYTES).filter(any),
    armings=st.integers(0, 2**32 - 1),
    text=st.just(""),
)


def said(frame: GuardFrame) -> dict[str, object]:
    """All fields of a packet; arrays as lists."""
    named = frame._asdict().items()
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in named}


@given(FRAMES)
def test_a_frame_arrives_as_it_was_sent(frame: GuardFrame) -> None:
    packet = packet_of(frame)
    assert len(packet) == FRAME_BYTES
    assert said(read_packet(packet)) == said(frame)


@given(st.text(max_size=2000), st.integers(1, 2**64 - 1))
def test_options_arrive_as_they_were_sent(text: str, counter: int) -> None:
    if text.isprintable():  # JSON escapes the rest
        frame = GuardFrame(Kind.OPTIONS, counter, text=text)
        assert said(read_packet(packet_of(frame))) == said(frame)


def test_more_numbers_than_a_frame_has_are_refused() -> None:
    with pytest.raises(ValueError, match="65 joints and fingers, expected at most 64"):
        packet_of(GuardFrame(Kind.POSITIONS, values=np.zeros(65)))


@given(FRAMES, st.data())
def test_a_damaged_packet_is_refused(frame: GuardFrame, data: st.DataObject) -> None:
    packet = bytearray(packet_of(frame))
    how = data.draw(st.sampled_from(["bits", "cut", "longer", "bytes"]))
    place = data.draw(st.integers(0, len(packet) - 1))
    if how == "bits":
        for bit in data.draw(st.sets(st.integers(0, 8 * len(packet) - 1), min_size=1, max_size=5)):
            packet[bit // 8] ^= 1 << bit % 8
    elif how == "bytes":
        packet[place] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del packet[place:]
    else:
        packet += data.draw(st.binary(min_size=1, max_size=50))
    with pytest.raises(DamagedError):
        read_packet(bytes(packet))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_repeated_and_reordered_packets_are_refused(counters: list[int]) -> None:
    (sender, reader), newest = socket_pair(), 0
    for counter in counters:
        packet = packet_of(GuardFrame(Kind.STOP, counter))
        if counter > newest:
            newest = counter
            assert getattr(reader.read(packet), "counter", 0) == counter
        else:
            refused = reader.read(packet)
            assert isinstance(refused, DamagedError)
            assert ("repeated" if counter == newest else "reordered") in str(refused)
    sender.close()
    reader.close()


def test_packets_arrive_whole_and_in_order_and_the_end_is_seen_after_the_last() -> None:
    ours, theirs = socket_pair()
    packets = [packet_of(GuardFrame(Kind.KEEPALIVE, counter)) for counter in range(1, 101)]
    for packet in packets:
        ours.send(packet)
    ours.close()
    assert list(theirs.take()) == packets
    assert theirs.is_closed
    theirs.close()


def test_a_full_channel_and_a_broken_one_are_errors_and_nobody_waits() -> None:
    ours, theirs = socket_pair()
    sent = 0

    def fill() -> None:
        nonlocal sent
        while sent < 100_000:
            ours.send(packet_of(GuardFrame(Kind.KEEPALIVE, sent + 1)))
            sent += 1

    with pytest.raises(ChannelError, match="the channel is full"):
        fill()
    assert sent > 100, "half a second of commands at 250 Hz must fit"
    theirs.close()
    with pytest.raises(ChannelError, match="the channel is broken"):
        ours.send(packet_of(GuardFrame(Kind.KEEPALIVE, 1)))
    ours.close()


def test_a_packet_that_is_too_long_is_damaged() -> None:
    ours, theirs = socket_pair()
    ours.send(bytes(70_000))
    [packet] = theirs.frames()
    assert isinstance(packet, DamagedError)
    with pytest.raises(DamagedError):
        read_packet(b"")
    ours.close()
    theirs.close()


def test_a_forked_process_does_not_keep_the_channel_open_and_a_program_does_not_inherit_it() -> None:
    ours, theirs = socket_pair()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:  # it lives until the pipe is closed
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    assert not os.get_inheritable(ours.socket.fileno())
    ours.socket.close()  # as when the node is killed
    assert select.select([theirs.socket], [], [], 10)[0], "the child has closed its copy"
    assert list(theirs.take()) == []
    assert theirs.is_closed
    theirs.close()
    os.close(writes)
    os.close(reads)
    assert os.waitpid(child, 0)[1] == 0


def test_a_channel_is_closed_for_whoever_has_a_copy_of_it() -> None:
    ours, theirs = socket_pair()
    copy = ours.socket.dup()
    ours.close()
    assert list(theirs.take()) == []
    assert theirs.is_closed
    copy.close()
    theirs.close()


def test_the_newest_shared_text_is_read_once_and_never_half_of_it() -> None:
    file = os.memfd_create("text")
    copies = os.dup(file), os.dup(file)
    writer, reader = map(SharedText, copies)
    assert reader.read() is None, "nothing was written"
    for text in ("first", "second"):
        writer.write(text)
    assert reader.read() == "second"
    assert reader.read() is None, "it was read before"
    writer.write("third")
    os.pwrite(file, b"x", 14)  # as if it was being written
    assert reader.read() is None
    writer.write("")
    assert reader.read() == ""
    with pytest.raises((IndexError, ValueError)):
        writer.write("x" * 70_000)
    os.close(file)
