"""What is changed about a run of the demo to see what the policy relies on, and what must come of it.

Each control is nothing but words of the ``vla-ros demo`` command line, so that the fast evaluation here and the
real command do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.train.recipe import FOREIGN_DATASET


@dataclass(frozen=True)
class Control:
    """One row of the table.

    Attributes:
        name: Short name, for ``--only``.
        title: What the table calls it.
        words: Arguments of ``vla-ros demo``.
        at_least: Share of successes that is expected at least.
        at_most: Share of successes that is expected at most.
    """

    name: str
    title: str
    words: tuple[str, ...] = ()
    at_least: float = 0.0
    at_most: float = 1.0

    def met(self, success_rate: float) -> bool:
        """Whether the share of successes is what is expected."""
        return self.at_least <= success_rate <= self.at_most


CONTROLS: tuple[Control, ...] = (
    Control("plain", "as it is meant", at_least=0.97),
    Control("switch", "command switched to a distractor at step 6", ("--switch-at", "6"), at_least=0.95),
    Control("bump", "arm knocked aside by up to 5 cm", ("--bump", "0.05"), at_least=0.9),
    Control("dim", "camera dimmed to 60 %", ("--dim", "0.6"), at_least=0.9),
    Control("shuffle", "another object named than judged by", ("--shuffle",), at_most=0.1),
    Control("blank", "black picture", ("--blank",), at_most=0.0),
    Control("orientation", "orientation fix off", ("-p", "camera.orientation:=[none]"), at_most=0.1),
    Control("gripper", "gripper binarisation off", ("-p", "gripper.mode:=continuous"), at_most=0.1),
    Control("unnorm", "wrong unnorm_key", ("-p", f"policy.unnorm_key:={FOREIGN_DATASET}"), at_most=0.1),
    Control("crop", "centre crop of 0.9 that training did not have", ("-p", "camera.crop_area:=0.9"), at_most=0.9),
)
"""The table of ``docs/demo-policy.md``."""


def chosen(names: str) -> tuple[Control, ...]:
    """The controls named, separated by commas; all where ``names`` is empty.

    Raises:
        ValueError: There is no such control.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {control.name: control for control in CONTROLS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"controls: found {unknown}, expected some of {', '.join(known)}")
    return tuple(known[name] for name in wanted) or CONTROLS
