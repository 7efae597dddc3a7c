"""Fuzz targets: everything that parses external bytes. A target may raise only our own errors."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import VlaRosError
from vla_ros.graph.messages import message_types
from vla_ros.policies.remote.dialect import read_map
from vla_ros.policies.remote.dialects import GR00T, OFT_HTTP, OPENPI
from vla_ros.serve.requests import RequestSchema, check_request, observation
from vla_ros.vision.decode import decode_compressed, decode_image
from vla_ros.vision.messages import image_stamp
from vla_ros_lab.replay.bag import Bag

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
"""Most records that a bag may yield; a seed has six."""

SCHEMA = RequestSchema(
    PolicySpec(
        tuple(map(ImageFeature, ("exterior_image_1_left", "wrist_image_left"))),
        (StateFeature("joint_position"), StateFeature("gripper_position")),
    )
)
ANSWERS: Mapping[str, Callable[[bytes], object]] = {
    "openpi": OPENPI.decode_response,
    "gr00t": GR00T.decode_response,
    "modality": GR00T.decode_metadata,
    "oft": OFT_HTTP.decode_response,
    "metadata": lambda data: OPENPI.spec(read_map(data, "metadata"), 64),
}

_SUFFIXES = (".mcap", ".db3")
_FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


def message(data: bytes) -> None:
    """CDR of every message type that the node receives; the first byte selects the type."""
    types = message_types("jazzy")
    types.deserialize(data[1:], types.message(TYPES[data[0] % len(TYPES)]))


def image(data: bytes) -> None:
    """A ``sensor_msgs/Image``: first its stamp, then its pixels, as in the node."""
    image_stamp(data)
    decode_image(data)


def compressed(data: bytes) -> None:
    """A ``sensor_msgs/CompressedImage``: JPEG and PNG decoders."""
    image_stamp(data)
    decode_compressed(data)


def bag(data: bytes) -> None:
    """A bag file; the first byte selects the storage."""
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        path = Path(folder) / f"bag{_SUFFIXES[data[0] % len(_SUFFIXES)]}"
        path.write_bytes(data[1:])
        with Bag(path) as opened:
            for count, _ in enumerate(opened.records(list(opened.topics))):
                if count > MOST_RECORDS:
                    raise AssertionError(f"more than {MOST_RECORDS} records in {len(data)} bytes")


def request(data: bytes) -> None:
    """A robot's request, as the policy server reads it: arrays, JPEGs, observation."""
    observation(check_request(OPENPI.decode_request(data), SCHEMA), SCHEMA, 0)


def answer(data: bytes) -> None:
    """A policy server's answer, as the client reads it; the first byte selects the dialect."""
    list(ANSWERS.values())[data[0] % len(ANSWERS)](data[1:])


def only_our_errors(target: Callable[[bytes], None], data: bytes) -> bool:
    """Run a target; returns True if the bytes were accepted, False if they were refused with our own error."""
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
    "request": request,
    "answer": answer,
}


def seeds(name: str, corpus: Path) -> list[bytes]:
    """The inputs of a target from its seed files."""
    files = sorted((corpus / name).iterdir())
    if name == "message":
        return [bytes([TYPES.index(file.name.replace(".", "/"))]) + file.read_bytes() for file in files]
    if name == "answer":
        return [bytes([list(ANSWERS).index(file.stem.split("_")[0])]) + file.read_bytes() for file in files]
    if name == "bag":
        return [bytes([_SUFFIXES.index(file.suffix)]) + file.read_bytes() for file in files]
    return [file.read_bytes() for file in files]
