"""Controls: changes to the demo that show what the policy relies on, with the expected success rates.

Each control is a list of ``vla-ros demo`` options, so that this evaluation and the command do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.train.recipe import FOREIGN_DATASET


@dataclass(frozen=True)
class Control:
    """One row of the table.

    Attributes:
        name: Short name, for ``--only``.
        title: Name in the table.
        options: Options of ``vla-ros demo``.
        at_least: Lowest expected success rate.
        at_most: Highest expected success rate.
    """

    name: str
    title: str
    options: tuple[str, ...] = ()
    at_least: float = 0.0
    at_most: float = 1.0

    def met(self, success_rate: float) -> bool:
        """Whether the success rate is as expected."""
        return self.at_least <= success_rate <= self.at_most


CONTROLS: tuple[Control, ...] = (
    Control("plain", "unchanged", at_least=0.97),
    Control("switch", "instruction switched to a distractor at step 6", ("--switch-at", "6"), at_least=0.95),
    Control("bump", "arm bumped by up to 5 cm", ("--bump", "0.05"), at_least=0.9),
    Control("dim", "camera dimmed to 60 %", ("--dim", "0.6"), at_least=0.9),
    Control("shuffle", "another object asked for than judged by", ("--shuffle",), at_most=0.1),
    Control("blank", "black image", ("--blank",), at_most=0.0),
    Control("orientation", "orientation fix off", ("-p", "camera.orientation:=[none]"), at_most=0.1),
    Control("gripper", "gripper binarisation off", ("-p", "gripper.mode:=continuous"), at_most=0.1),
    Control("unnorm", "wrong unnorm_key", ("-p", f"policy.unnorm_key:={FOREIGN_DATASET}"), at_most=0.1),
    Control("crop", "centre crop of 0.9, unlike training", ("-p", "camera.crop_area:=0.9"), at_most=0.9),
)
"""The table of ``docs/demo-policy.md``."""


def chosen(names: str) -> tuple[Control, ...]:
    """The named controls, separated by commas; all if ``names`` is empty.

    Raises:
        ValueError: There is no such control.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {control.name: control for control in CONTROLS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"controls: found {unknown}, expected some of {', '.join(known)}")
    return tuple(known[name] for name in wanted) or CONTROLS
