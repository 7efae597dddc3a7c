"""Measures frames per second and memory of replay with a policy that takes no time, for docs/replay.md.

Writes a bag of VGA frames, plays it twice, and prints the processor time per frame of the second time.

    python benchmarks/replay.py [--frames N] [--storage mcap|sqlite3] [--arm]
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

HOME = (0.0, 0.438, 0.0, 1.834, 0.0, 0.8696, 0.0)


def write(folder: Path, frames: int, storage: str) -> Path:
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    from vla_ros.vision.messages import encode_image

    store = get_typestore(Stores.ROS2_JAZZY)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (480, 640, 3), dtype=np.uint8) for _ in range(4)]
    header, clock = store.types["std_msgs/msg/Header"], store.types["builtin_interfaces/msg/Time"]
    state = store.types["sensor_msgs/msg/JointState"]
    plugin = StoragePlugin.MCAP if storage == "mcap" else StoragePlugin.SQLITE3
    with Writer(folder / "bag", version=9, storage_plugin=plugin) as writer:
        camera = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=store)
        joints = writer.add_connection("/joint_states", "sensor_msgs/msg/JointState", typestore=store)
        for index in range(frames):
            stamp = 1_790_000_000_000_000_000 + index * 33_000_000
            message = state(
                header=header(stamp=clock(sec=stamp // 10**9, nanosec=stamp % 10**9), frame_id=""),
                name=[f"joint_{number}" for number in range(1, 8)],
                position=np.array(HOME),
                velocity=np.zeros(0),
                effort=np.zeros(0),
            )
            writer.write(joints, stamp, store.serialize_cdr(message, "sensor_msgs/msg/JointState"))
            writer.write(camera, stamp, encode_image(images[index % 4], stamp, "camera"))
    return folder / "bag"


def play(path: Path, arm: bool) -> tuple[int, float]:
    from vla_ros.config import load
    from vla_ros.policies.base import create
    from vla_ros.replay import evaluate
    from vla_ros.replay.play import ReplayOptions

    options = ["policy.name:=hold", *(["robot.urdf:=demo", "robot.tip_frame:=tool"] if arm else [])]
    config = load([], options)
    policy = create(config)
    policy.load()
    job = evaluate.BagJob(path, config, ReplayOptions(instruction="hold still"))
    evaluate.play(job, lambda: policy)  # imports, page cache
    began = time.process_time()
    outcome = evaluate.play(job, lambda: policy)
    took = time.process_time() - began
    if outcome.samples is None:
        raise SystemExit(outcome.problem)
    return len(outcome.samples.times), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=4000)
    parser.add_argument("--storage", choices=("mcap", "sqlite3"), default="mcap")
    parser.add_argument("--arm", action="store_true", help="with the demo's kinematics and limits")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), arguments.frames, arguments.storage)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        frames, seconds = play(path, arguments.arm)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(
            f"{frames / seconds:.0f} frames/s of processor time, peak memory {after} MB ({before} MB when it began)"
        )


if __name__ == "__main__":
    main()
