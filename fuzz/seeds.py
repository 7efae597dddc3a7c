"""Write the seed corpus, small valid examples of everything that is parsed: ``python fuzz/seeds.py``."""

import base64
import io
import json
import shutil
import struct
import tempfile
from pathlib import Path

import cv2
import msgpack
import numpy as np
from PIL import Image
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.graph.messages import message_types
from vla_ros.policies.remote.messages import nd, npy, openpi, pack
from vla_ros.policies.remote.openpi import OPENPI
from vla_ros.vision.messages import encode_compressed, encode_image

CORPUS = Path(__file__).parent / "corpus"
STAMP = 1_700_000_000_123_456_789


def images() -> dict[str, bytes]:
    """Serialised images of every layout, by file name below the corpus."""
    rng = np.random.default_rng(1)
    colour = rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)
    found = {
        f"image/{encoding}": encode_image(pixels, STAMP, "camera", encoding)
        for encoding, pixels in {
            "rgb8": colour,
            "bgra8": rng.integers(0, 255, (6, 8, 4), dtype=np.uint8),
            "mono8": colour[..., 0],
            "yuv422_yuy2": rng.integers(0, 255, (6, 8, 2), dtype=np.uint8),
        }.items()
    }
    planes = rng.integers(0, 255, (24, 16), dtype=np.uint8)
    found["image/nv12"] = _of_height(encode_image(planes, STAMP, "camera", "nv12"), 16)
    found["image/nv24"] = _of_height(encode_image(planes, STAMP, "camera", "nv24"), 8)
    found["image/padded"] = encode_image(colour, STAMP, "", "bgr8", step=64)
    jpeg = cv2.imencode(".jpg", colour)[1].tobytes()
    progressive = cv2.imencode(".jpg", colour, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    for name, data in (
        ("jpeg", jpeg),
        ("progressive", progressive),
        ("stray", _with_stray_bytes(colour)),
        ("png", _png(colour)),
        ("grey", _png(colour[..., 0])),
    ):
        found[f"compressed/{name}"] = encode_compressed(data, STAMP, "camera", "rgb8; jpeg compressed bgr8")
    return found


def _of_height(image: bytes, height: int) -> bytes:
    """Change the height of a serialised image, which has planes of several heights."""
    at = image.index(struct.pack("<II", 24, 16))
    return image[:at] + struct.pack("<I", height) + image[at + 4 :]


def _with_stray_bytes(pixels: np.ndarray) -> bytes:
    """A JPEG with three stray bytes before a restart marker."""
    out = io.BytesIO()
    Image.fromarray(np.tile(pixels, (4, 4, 1))).save(out, "JPEG", restart_marker_blocks=1, subsampling="4:2:0")
    data = out.getvalue()
    at = data.index(b"\xff\xd0")
    return data[:at] + b"\0\0\0" + data[at:]


def _png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def wire() -> dict[str, bytes]:
    """Requests of robots and answers of policy servers, by file name below the corpus."""
    rng = np.random.default_rng(2)
    image = rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)
    states = {"joint_position": np.zeros(7), "gripper_position": np.zeros(1, np.float32)}
    both = {f"observation/{key}": value for key, value in states.items()} | {"prompt": "go", "session_id": "A"}
    views = "observation/exterior_image_1_left", "observation/wrist_image_left"
    found = {
        f"request/{layout.__name__}": pack(both | dict.fromkeys(views, image), layout)
        for layout in (openpi, npy, nd)
    }
    jpeg = cv2.imencode(".jpg", image)[1].tobytes()
    text = both | {"prompt": np.array("pick up the cup")}
    found["request/text"] = msgpack.packb(text | dict.fromkeys(views, image), default=_any_array)
    extension = {"vla_ros": {"number": 1, "deadline_ms": 50.0, "begins": True}}
    found["request/jpeg"] = pack(both | dict.fromkeys(views, jpeg) | extension)
    chunk = rng.normal(size=(1, 4, 7)).astype(np.float32)
    spec = PolicySpec((ImageFeature("image"),), (StateFeature("state", parse_components("arm.joint_position")),))
    modality = {
        "video": {"__ModalityConfig__": True, "as_json": {"modality_keys": ["front"], "delta_indices": [0]}}
    }
    rows = [
        {"__numpy__": base64.b64encode(row.tobytes()).decode(), "dtype": "<f4", "shape": [7]} for row in chunk[0]
    ]
    return found | {
        "answer/openpi_map": pack({"actions": chunk[0], "server_timing": {"infer_ms": 1.5}}),
        "answer/openpi_bare": pack(chunk[0]),
        "answer/gr00t_npy": pack([{"arm": chunk, "gripper": chunk[..., :1]}, {}], npy),
        "answer/gr00t_nd": pack([{"arm": chunk}, {}], nd),
        "answer/modality": pack(modality),
        "answer/oft": json.dumps(rows).encode(),
        "answer/metadata": OPENPI.encode_metadata("openvla", spec),
    }


def _any_array(value: np.ndarray) -> dict[bytes, object]:
    """As openpi's client packs an array, also one of text."""
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def messages() -> dict[str, bytes]:
    """Serialised messages of every type that the node receives, by file name (the type with dots)."""
    types = message_types("jazzy")
    made = {
        "sensor_msgs/msg/JointState": {
            "name": ["joint_1", "elbow"],
            "position": [0.5, -1.0],
            "velocity": [0.0, 0.1],
        },
        "std_msgs/msg/String": {"data": "pick up the größere cup"},
        "std_msgs/msg/Bool": {"data": True},
        "std_msgs/msg/Empty": {},
        "rosgraph_msgs/msg/Clock": {},
        "diagnostic_msgs/msg/DiagnosticArray": {
            "status": [
                types.message("diagnostic_msgs/msg/DiagnosticStatus")(
                    name="a", values=[types.message("diagnostic_msgs/msg/KeyValue")(key="k", value="v")] * 3
                )
            ]
        },
        "std_srvs/srv/SetBool_Request": {"data": True},
    }
    return {
        f"message/{name.replace('/', '.')}": types.serialize(types.message(name)(**fields))
        for name, fields in made.items()
    }


def bags() -> dict[str, bytes]:
    """Bags with two topics in every storage and compression."""
    parts = {**images(), **messages()}
    found = {}
    for name, plugin, compression in (
        ("mcap", StoragePlugin.MCAP, None),
        ("mcap_zstd", StoragePlugin.MCAP, CompressionMode.STORAGE),
        ("db3", StoragePlugin.SQLITE3, None),
        ("db3_zstd", StoragePlugin.SQLITE3, CompressionMode.MESSAGE),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bag"
            writer = Writer(path, version=9, storage_plugin=plugin)
            if compression is not None:
                writer.set_compression(compression, CompressionFormat.ZSTD)
            store = get_typestore(Stores.ROS2_JAZZY)
            with writer:
                image = writer.add_connection("/camera", "sensor_msgs/msg/CompressedImage", typestore=store)
                joints = writer.add_connection("/joint_states", "sensor_msgs/msg/JointState", typestore=store)
                for index in range(3):
                    writer.write(image, STAMP + index, parts["compressed/jpeg"])
                    writer.write(joints, STAMP + index, parts["message/sensor_msgs.msg.JointState"])
            file = next(each for each in path.iterdir() if each.suffix in (".mcap", ".db3", ".zstd"))
            found[f"bag/{name}{''.join(file.suffixes)}"] = file.read_bytes()
    return found


def main() -> None:
    shutil.rmtree(CORPUS, ignore_errors=True)
    for name, data in {**images(), **messages(), **bags(), **wire()}.items():
        path = CORPUS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
