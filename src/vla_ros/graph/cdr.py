"""Checks the lengths in a serialised message before rclpy deserialises it.

Fast CDR allocates a sequence before it looks whether its elements are there: one flipped bit in a length stops the
process for a minute, or until its memory is used up.
"""

from typing import Any

from vla_ros.errors import VlaRosError

_HEADER = 4  # bytes: representation and options
_SIZES = {
    **dict.fromkeys(("boolean", "octet", "char", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16"), 2),
    **dict.fromkeys(("int32", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}


def check_lengths(cdr: Any, msg_type: Any) -> None:
    """Raise VlaRosError if ``cdr`` claims more strings or elements than it has bytes.

    ``msg_type`` is a message class of rclpy, whose ``SLOT_TYPES`` describe its fields.
    """
    data = memoryview(cdr)
    if len(data) < _HEADER or data[0] != 0 or data[1] not in (0, 1):
        raise VlaRosError(
            f"{msg_type.__name__}: expected plain CDR, found the header {bytes(data[:_HEADER]).hex()}"
        )
    _Reader(data[_HEADER:], "little" if data[1] else "big", msg_type.__name__).message(msg_type)


class _Reader:
    """Walks a message; ``at`` is the next byte."""

    def __init__(self, data: memoryview, order: Any, name: str) -> None:
        self._data, self._order, self._name, self._at = data, order, name, 0

    def message(self, msg_type: Any) -> None:
        for kind in msg_type.SLOT_TYPES:
            self._field(kind)

    def _field(self, kind: Any) -> None:
        match type(kind).__name__:
            case "BasicType":
                self._skip(_SIZES[kind.typename])
            case "UnboundedString" | "BoundedString":
                self._skip(1, self._length())
            case "Array":
                self._elements(kind.value_type, kind.size)
            case "UnboundedSequence" | "BoundedSequence":
                self._elements(kind.value_type, self._length())
            case "NamespacedType":
                module = __import__(".".join(kind.namespaces), fromlist=[kind.name])
                self.message(getattr(module, kind.name))
            case other:
                raise VlaRosError(f"{self._name}: fields of type {other} are not supported")

    def _elements(self, kind: Any, count: int) -> None:
        if type(kind).__name__ == "BasicType":
            if count:
                self._skip(_SIZES[kind.typename], count)
            return
        for _ in range(count):
            self._field(kind)

    def _length(self) -> int:
        """Read a length; each element has at least a byte."""
        self._skip(4)
        count = int.from_bytes(self._data[self._at - 4 : self._at], self._order)
        if count > len(self._data) - self._at:
            self._fail(count)
        return count

    def _skip(self, size: int, count: int = 1) -> None:
        self._at += -self._at % size + size * count
        if self._at > len(self._data):
            self._fail(count)

    def _fail(self, count: int) -> None:
        raise VlaRosError(f"{self._name}: damaged: {count} elements end after its {len(self._data)} bytes")
