"""Messages from the node to its recorder, through memory that both share: no lock, and neither waits for the other.

The memory has no name, so nothing is left when its processes are gone, whatever ended them. Numbers are in a page
that both map. Messages are written and read with system calls: they do not hold the interpreter lock, and the
kernel counts references to each page with full barriers, which order messages and numbers on any processor.
"""

import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vla_ros.record.topics import Recorded

_WRITTEN, _READ, _DROPPED = range(3)  # words of the first page; from the last on, one for each topic
_PAGE = 4096
_ENTRY = struct.Struct("<IIQQ")  # number of the topic, bytes of the message that follows, receive and publish time


class Ring:
    """A ring of messages of ``topics``, which one thread writes and one thread of another process reads.

    A message begins at its position modulo the capacity and is in one piece: the memory is half a capacity longer.
    ``descriptor`` is the memory's, from :meth:`create`.
    """

    def __init__(self, descriptor: int, topics: Sequence[str]) -> None:
        self.descriptor = descriptor
        self._topics = {topic: _DROPPED + number for number, topic in enumerate(topics)}
        self._names = tuple(topics)
        self._capacity = (os.fstat(descriptor).st_size - _PAGE) * 2 // 3
        self._page = mmap.mmap(descriptor, _PAGE)
        self._words = memoryview(self._page).cast("Q")
        self._counted = [0] * len(topics)  # drops that the reader knows

    @classmethod
    def create(cls, capacity: int, topics: Sequence[str]) -> "Ring":
        """Create a ring of so many bytes, an even number. Raises OSError if there is not enough memory."""
        descriptor = os.memfd_create("vla_ros_recorder")
        os.posix_fallocate(descriptor, 0, _PAGE + capacity)
        os.ftruncate(descriptor, _PAGE + capacity + capacity // 2)
        return cls(descriptor, topics)

    def write(self, messages: Iterable[Recorded]) -> None:
        """Append messages. One that needs more than half of the free bytes is dropped, and counted for the reader.

        So small messages have room where images no longer do.
        """
        words = self._words
        for message in messages:
            number, at = self._topics[message.topic], words[_WRITTEN]
            entry = _ENTRY.pack(number - _DROPPED, len(message.data), message.time, message.published)
            size = len(entry) + len(message.data)
            if 2 * size > self._capacity - at + words[_READ]:
                words[number] += 1
            elif os.pwritev(self.descriptor, [entry, message.data], _PAGE + at % self._capacity) == size:
                words[_WRITTEN] = at + size
            else:
                raise OSError("no memory is left for the recorder's messages")

    def read(self) -> Iterator[Recorded]:
        """Take the messages that wait."""
        words = self._words
        while (at := words[_READ]) < words[_WRITTEN]:
            start = _PAGE + at % self._capacity
            number, length, time, published = _ENTRY.unpack(os.pread(self.descriptor, _ENTRY.size, start))
            data = os.pread(self.descriptor, length, start + _ENTRY.size)
            words[_READ] = at + _ENTRY.size + length
            yield Recorded(time, published, self._names[number], data)

    def take_dropped(self) -> Mapping[str, int]:
        """Return how many messages of each topic were dropped since the last call, if any."""
        before, self._counted = self._counted, list(self._words[_DROPPED : _DROPPED + len(self._names)])
        counts = [after - known for after, known in zip(self._counted, before, strict=True)]
        return {topic: count for topic, count in zip(self._names, counts, strict=True) if count}

    def close(self) -> None:
        self._words.release()
        self._page.close()
        os.close(self.descriptor)
