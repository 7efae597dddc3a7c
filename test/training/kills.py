"""Kills a run at random moments until it is done, and compares its losses with those of an unbroken run.

python test/training/kills.py --kills 20
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PART = r"action_|time_mlp|paligemma_with_expert.gemma_expert"
_PATIENCE = 1800.0  # s until a process has taken a step


def start(folder, steps, batch, *launcher, **variables):
    """Run ``runs.py`` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    script = str(Path(__file__).with_name("runs.py"))
    command = [sys.executable, *launcher, script, str(folder), str(steps), str(batch), PART]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def unbroken_losses(folder, steps):
    """Run to the end, from the newest state if there is one."""
    assert start(folder, steps, 2).wait(_PATIENCE) == 0
    return json.loads((folder / "losses.json").read_text())


def killed_losses(folder, steps, kills, seed=0):
    """Return the losses of a run that is killed ``kills`` times, and after which steps it was.

    One kill in four is at a random moment of the start, the others from the first step on: while a step is
    computed, while a state is written, between the two.
    """
    random, began, seconds = np.random.default_rng(seed), [], []
    for _ in range(kills):
        before, child, started = newest(folder), start(folder, steps, 2), time.monotonic()
        if seconds and random.random() < 0.25:
            time.sleep(random.uniform(0, min(seconds)))
        else:
            while newest(folder) == before and child.poll() is None and time.monotonic() - started < _PATIENCE:
                time.sleep(0.005)
            seconds.append(time.monotonic() - started)
            time.sleep(random.uniform(0, 0.5))
        assert child.poll() is None, "the run ended before it was killed: more steps are needed"
        child.send_signal(signal.SIGKILL)
        child.wait()
        began.append(newest(folder))
    return unbroken_losses(folder, steps), began


def newest(folder):
    return max((int(one.name.removeprefix("step-")) for one in folder.glob("step-*")), default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="of the run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        expected = unbroken_losses(Path(name) / "whole", given.steps)
        found, began = killed_losses(Path(name) / "run", given.steps, given.kills, given.seed)
    print(
        f"killed {len(began)} times, after the steps {began}; the losses of {len(found)} steps are those of an "
        f"unbroken run: {found == expected}"
    )
    return int(found != expected)


if __name__ == "__main__":
    sys.exit(main())
