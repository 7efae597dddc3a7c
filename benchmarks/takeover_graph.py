"""Measures requests of a takeover over the graph: from the call to the answer, and commands that come too late."""

import random
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a file

from tools.faults.handover import late_commands
from tools.faults.processes import DOMAINS, reserved
from tools.faults.records import Record
from tools.faults.rig import Rig

_OPTIONS = {
    "control.rate_hz": "50.0",
    "takeover.input": "leader",
    "takeover.leader": "/leader/joint_states",
    "limits.max_joint_acceleration": "12.0",
}


def measure_requests(count: int) -> dict[str, Any]:
    """Take over and hand back ``count`` times at random moments from a running node in a process of its own.

    Returns the times to the answer in milliseconds, and each command of the policy that was sent after an answer,
    and of the person after handing back was answered, by the middleware's source timestamps. No other run on this
    host uses its DDS domain.
    """
    rng = random.Random(count)
    free = SimpleQueue[int]()
    for domain in rng.sample(DOMAINS, len(DOMAINS)):
        free.put(domain)
    with reserved(free) as domain, Rig(domain, _OPTIONS, robot_words=("--person", "leader")) as rig:
        rig.ready()
        rig.arm()
        for what in ("correct", "policy") * count:
            before = _answers(rig)
            rig.order(do="ask", what=what)
            rig.wait(lambda before=before: _answers(rig) > before, f"answer to {what}")  # type: ignore[misc]
            time.sleep(rng.uniform(0.05, 0.3))
        records = list(rig.records)
    return figures(records)


def _answers(rig: Rig) -> int:
    return sum(record.kind == "answer" for record in rig.records)


def figures(records: list[Record]) -> dict[str, Any]:
    """Return the figures of a run's records."""
    asked = [record.time for record in records if record.kind == "ask"]
    answers = [record for record in records if record.kind == "answer"]
    times = [1e3 * (answer.time - at) for at, answer in zip(asked, answers, strict=True)]
    p50, p99 = np.percentile(times, [50, 99])
    late = [f"{found}: {command.line()}" for command, found in late_commands(records, eases=True)]
    return {
        "requests": len(times),
        "refused": sum(bool(answer.text) for answer in answers),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "late": len(late),
        "late_commands": late,
    }
