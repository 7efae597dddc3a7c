"""The laboratory: its commands, and what ``vla-ros doctor`` reports about it."""

import ctypes
from collections.abc import Iterator

from vla_ros.houses import NOTE, WRONG, Finding, House, SubCommand, check_library, installed


def examine() -> Iterator[Finding]:
    """Yield what concerns the simulation: MuJoCo, and EGL for its cameras."""
    yield check_library("MuJoCo", "mujoco", NOTE, "pip install 'vla_ros[sim]' (needed by the demo)")
    yield _egl()


def _egl() -> Finding:
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        fix, level = "sudo apt-get install libegl1 libgl1-mesa-dri", WRONG if installed("mujoco") else NOTE
        return Finding("EGL", "libEGL.so.1 does not load: the simulation cannot render", level, fix)
    return Finding("EGL", "libEGL.so.1 loads")


HOUSE = House(
    "the laboratory",
    {
        "demo": SubCommand("vla_ros_lab.eval.demo", "watch a policy move the simulated arm"),
        "eval": SubCommand("vla_ros_lab.eval.cli", "score a policy on benchmarks, through the node"),
        "replay": SubCommand("vla_ros_lab.replay.cli", "evaluate a policy on recorded bags"),
        "compare": SubCommand("vla_ros_lab.replay.compare", "compare two replay results"),
        "export": SubCommand("vla_ros_lab.export.cli", "write recorded bags as a LeRobot data set"),
        "finetune": SubCommand("vla_ros_lab.training.cli", "train a checkpoint on recordings, or compare both"),
        "distill": SubCommand("vla_ros_lab.training.distill", "distil a flow into one, two or four steps"),
        "bench": SubCommand("vla_ros_lab.bench.cli", "measure latency on this machine, stage by stage"),
    },
    examine,
)
