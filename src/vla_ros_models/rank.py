"""Another rank of a model that is split over several GPUs: ``python -m vla_ros_models.rank SOCKET PARENT``.

It loads its shard as rank 0 does, through the same policy, and then obeys (:mod:`vla_ros_models.ranks`).
"""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from vla_ros.errors import VlaRosError
from vla_ros_models.oft.policy import OFTPolicy
from vla_ros_models.openvla.policy import OpenVLAPolicy
from vla_ros_models.ranks import MESSAGE, FollowingRank, restore_config

_PDEATHSIG = 1  # of prctl(2)

POLICIES = {policy.Options.__name__: policy for policy in (OpenVLAPolicy, OFTPolicy)}


def run(message: dict[str, Any], channel: socket.socket) -> None:
    """Load the shard that ``message`` describes, and obey until rank 0 closes ``channel``."""
    kind = POLICIES[message["kind"]]
    policy = kind(restore_config(message, kind.Options))
    device, folder = torch.device(message["device"]), Path(message["folder"])
    policy.join(FollowingRank(message["rank"], message["count"], device, folder, channel))
    with suppress(SystemExit):
        policy.load()


def main() -> None:
    """Run a rank; end with the parent, whatever ends it."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        os._exit(1)
    channel, status = socket.socket(fileno=int(sys.argv[1])), 1
    try:
        message = json.loads(channel.recv(MESSAGE))
        logging.basicConfig(level=logging.WARNING, format=f"rank {message['rank']}: %(message)s")
        channel.send(b"here")
        run(message, channel)
        status = 0
    except BaseException as error:
        kind = "" if isinstance(error, VlaRosError) else f"{type(error).__name__}: "
        with suppress(OSError):
            channel.send(f"{kind}{error}".encode()[:MESSAGE])
    finally:
        # Destructors of NCCL and torch would wait for ranks that no longer answer.
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
