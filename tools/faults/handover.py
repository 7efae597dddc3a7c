"""Finds commands that come too late after a handover between policy and person. Pure logic.

A motion of the policy has the stamp of a frame, a hold that of a joint state; a person's motion has neither.
"""

import math
from collections.abc import Iterator, Sequence

from tools.faults.records import Record

EASED = 0.4
"""Seconds that a deceleration may last if ``limits.max_joint_acceleration`` makes it long."""


def late_commands(records: Sequence[Record], *, eases: bool) -> Iterator[tuple[Record, str]]:
    """Yield the policy's commands that were sent while a person had the arm, and the person's afterwards.

    From an answer to the next request, the arm belongs to who was asked for; before the answer, it may belong to
    both. With ``eases``, a motion with the stamp of the last one, sent shortly after the answer, is a deceleration.
    """
    frames = {record.stamp for record in records if record.kind == "frame"}
    holds = {record.stamp for record in records if record.kind == "joints"}
    may, since, last, asked = "policy", -math.inf, 0, 0
    for event in sorted(records, key=lambda record: record.time - record.delay):
        if event.kind == "ask":
            may, asked = may if event.name == "pause" else "both", asked + 1
        elif event.kind == "answer":
            asked -= 1
            if not event.text and not asked:  # another request may have been obeyed meanwhile
                may, since = {"pause": "nobody", "correct": "person"}.get(event.name, event.name), event.time
        elif event.kind == "command" and event.stamp not in holds:
            sent, who = event.time - event.delay, "policy" if event.stamp in frames else "person"
            slows = eases and event.stamp == last and sent < since + EASED
            if may not in (who, "both") and not slows:
                yield event, f"by the {who}, {1e3 * (sent - since):.1f} ms after {may} got the arm"
            last = event.stamp
