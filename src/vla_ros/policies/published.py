"""Rates and executed steps of the published evaluation loops.

No file of a checkpoint states them; they are constants of the code with which its authors ran it.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Loop(NamedTuple):
    """How a published client executes chunks."""

    rate_hz: float | None = None  # steps per second; None if unknown
    execute_steps: int = 0  # actions of a chunk before the next inference; 0 if unknown


UNKNOWN = Loop()

LOOPS: Mapping[tuple[str, str], Loop] = {
    # Physical-Intelligence/openpi 15a9616: examples/{libero,droid,aloha_real,aloha_sim}/main.py
    ("openpi", "libero"): Loop(20.0, 5),
    ("openpi", "droid"): Loop(15.0, 8),
    ("openpi", "droid_joint_position"): Loop(15.0, 8),
    ("openpi", "aloha"): Loop(50.0, 25),
    ("openpi", "aloha_sim"): Loop(50.0, 10),
    # moojink/openvla-oft 213c5ff: experiments/robot/{libero/run_libero_eval,aloha/run_aloha_eval}.py; for Bridge
    # the chunk of prismatic/vla/constants.py and the rate of OpenVLA
    ("oft", "libero"): Loop(20.0, 8),
    ("oft", "aloha"): Loop(25.0, 25),
    ("oft", "bridge"): Loop(5.0, 5),
    # NVIDIA/Isaac-GR00T 2d6e240: examples/DROID/main_gr00t.py
    ("gr00t", "gr00t_droid"): Loop(15.0, 15),
    # huggingface/lerobot 0.6.1: policies/groot/configuration_groot.py, of NVIDIA's rollouts
    ("gr00t", "gr00t_libero"): Loop(20.0, 8),
}


def loop_of(family: str, preset: str) -> Loop:
    """Return the loop of a family of policies (``openpi``, ``oft``, ``gr00t``) on the robot of a preset."""
    return LOOPS.get((family, preset), UNKNOWN)
