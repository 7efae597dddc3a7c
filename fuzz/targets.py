"""What is fuzzed: everything that parses bytes from elsewhere. Targets take bytes and raise only our errors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.replay.bag import Bag
from vla_ros.vision.decode import decode_compressed, decode_image, image_stamp

TYPES = (
    "sensor_msgs/msg/JointState",
    "std_msgs/msg/String",
    "std_msgs/msg/Bool",
    "std_msgs/msg/Empty",
    "rosgraph_msgs/msg/Clock",
    "diagnostic_msgs/msg/DiagnosticArray",
    "std_srvs/srv/SetBool_Request",
)
MOST_RECORDS = 10_000
"""Records read of one bag; a seed has six."""

_SUFFIXES = (".mcap", ".db3")
_FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


def message(data: bytes) -> None:
    """CDR of every message type that the node takes; the first byte chooses the type."""
    types = message_types("jazzy")
    types.deserialize(data[1:], types.message(TYPES[data[0] % len(TYPES)]))


def image(data: bytes) -> None:
    """A ``sensor_msgs/Image`` as the node takes it: first its stamp, then its pixels."""
    image_stamp(data)
    decode_image(data)


def compressed(data: bytes) -> None:
    """A ``sensor_msgs/CompressedImage``: JPEG and PNG decoders."""
    image_stamp(data)
    decode_compressed(data)


def bag(data: bytes) -> None:
    """A bag's file; the first byte chooses the storage."""
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        path = Path(folder) / f"bag{_SUFFIXES[data[0] % len(_SUFFIXES)]}"
        path.write_bytes(data[1:])
        with Bag(path) as opened:
            topics = [topic.name for topic in opened.topics]
            for count, _ in enumerate(opened.records(topics)):
                if count > MOST_RECORDS:
                    raise AssertionError(f"more than {MOST_RECORDS} records in {len(data)} bytes")


def only_our_errors(target: Callable[[bytes], None], data: bytes) -> bool:
    """Run a target; True where the bytes were good, False where they were refused in our words."""
    if not data:
        return False
    try:
        target(data)
    except VlaRosError:
        return False
    return True


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "message": message,
    "image": image,
    "compressed": compressed,
    "bag": bag,
}


def seeds(name: str, corpus: Path) -> list[bytes]:
    """The seeds of a target, as it takes them."""
    files = sorted((corpus / name).iterdir())
    if name == "message":
        return [bytes([TYPES.index(file.name.replace(".", "/"))]) + file.read_bytes() for file in files]
    if name == "bag":
        return [bytes([_SUFFIXES.index(file.suffix)]) + file.read_bytes() for file in files]
    return [file.read_bytes() for file in files]
