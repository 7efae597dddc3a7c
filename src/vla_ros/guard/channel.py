"""The channel between the node and its guard: a pair of Unix seqpacket sockets, made before the guard starts.

Packets arrive whole and in order, or not at all. Nobody waits: a channel that is full has nobody at its other end.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from weakref import WeakSet

from vla_ros.guard.frames import MOST_BYTES, DamagedError, GuardFrame, read_packet

_BUFFER = 1 << 18  # bytes; more than half a second of commands at 250 Hz
_MOST = 128  # packets that are taken at once


_open: "WeakSet[Channel]" = WeakSet()


class ChannelError(OSError):
    """The other end has ended, hangs or is too slow."""


def socket_pair() -> tuple["Channel", "Channel"]:
    """Return the two ends of a new channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ends[0]), Channel(ends[1])


class Channel:
    """One end of a channel.

    Attributes:
        socket: The socket, for a selector.
        is_closed: True once the other end was closed and everything that it sent has been taken.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.set_inheritable(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.socket, self.is_closed, self._last = end, False, 0
        _open.add(self)

    def send(self, packet: bytes) -> None:
        """Send a packet, at once. Raises ChannelError if the channel is full or broken."""
        try:
            self.socket.send(packet, socket.MSG_NOSIGNAL)
        except OSError as error:
            is_full = isinstance(error, BlockingIOError)
            raise ChannelError(f"the channel is {'full' if is_full else f'broken: {error.strerror}'}") from error

    def take(self) -> Iterator[bytes]:
        """Yield the packets that have arrived, oldest first."""
        for _ in range(_MOST):
            try:
                packet = self.socket.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.is_closed = True
                return
            yield packet

    def frames(self) -> list[GuardFrame | DamagedError]:
        """Return what the packets that have arrived say, oldest first."""
        return [self.read(packet) for packet in self.take()]

    def read(self, packet: bytes) -> GuardFrame | DamagedError:
        """Return what a packet says, or what is wrong with it, also if it was repeated or reordered."""
        try:
            frame = read_packet(packet)
        except DamagedError as error:
            return error
        if frame.counter <= self._last:
            what = "repeated" if frame.counter == self._last else "reordered"
            return DamagedError(f"{what}: found counter {frame.counter} after {self._last}")
        self._last = frame.counter
        return frame

    def close(self) -> None:
        """Close the channel, also for processes that have a copy of this end."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _close_copies() -> None:
    for channel in _open:
        channel.socket.close()


os.register_at_fork(after_in_child=_close_copies)
