"""The parts between a source of actions and the robot, made for one spec and one set of options."""

from collections.abc import Mapping
from dataclasses import dataclass

from vla_ros.config import Config
from vla_ros.config.control import ENVIRONMENT
from vla_ros.contract.binding import Binding, bind, make_arms
from vla_ros.contract.spec import PolicySpec
from vla_ros.contract.state import Arm
from vla_ros.control.collision import CollisionCheck
from vla_ros.control.measured import unstated
from vla_ros.control.robot import RobotController
from vla_ros.control.schedule import ActionSchedule
from vla_ros.node.observer import Observer
from vla_ros.node.trained import description


@dataclass(frozen=True, eq=False)
class ActionPipeline:
    """The parts on both sides of a source: frames -> observer -> source -> schedule -> controller -> commands."""

    binding: Binding  # which topic feeds which input; the spec and the options, completed by each other
    observer: Observer
    schedule: ActionSchedule
    controller: RobotController
    arms: Mapping[str, Arm]

    @property
    def warnings(self) -> list[str]:
        """What a person should check: units, a gripper that will not move, limits that nothing states."""
        named = len(self.arms) > 1
        assumed = [
            f"{name}: {text}" if named else text
            for name, arm in self.arms.items()
            if arm.config.output != ENVIRONMENT and (text := unstated(arm.config, arm.joints, arm.kinematics))
        ]
        return [
            *self._unused,
            *(f"features.joint_form: {text}" for state in self.binding.states for text in state.unit_warnings()),
            *(arm.unused_gripper for arm in self.controller.arms if arm.unused_gripper),
            *assumed,
        ]

    @property
    def _unused(self) -> list[str]:
        """Which options of ``control`` are not what the policy does."""
        spec, control, found = self.binding.spec, self.binding.config.control, []
        if control.schedule not in ("auto", self.schedule.kind):
            why = "returns single steps" if spec.horizon == 1 else "cannot continue the chunk being executed"
            found.append(
                f"control.schedule: found {control.schedule}, but the policy {why}: using '{self.schedule.kind}'"
            )
        if spec.execute_steps and control.execute_steps not in (0, spec.execute_steps):
            found.append(
                f"control.execute_steps: found {control.execute_steps}, but the policy states {spec.execute_steps}"
            )
        return found

    @property
    def summary(self) -> str:
        """What moves which topics from which cameras, in one line."""
        spec, config = self.binding.spec, self.binding.config
        outputs = [
            f"{topic} ({output})"
            for arm in config.arms
            for topic, output in ((arm.command, arm.output), (arm.gripper_topic, arm.gripper.output))
            if topic
        ]
        return (
            f"policy '{config.policy.name}' is ready: image(s) {', '.join(spec.image_keys)}, "
            f"{spec.dimension} numbers, {spec.horizon} step(s), {self.schedule.kind}; "
            f"{', '.join(config.camera.topics)} -> {' and '.join(outputs)}"
        )

    def describe(self) -> str:
        """Return how the source is bound to the robot, and how its actions will be executed."""
        table, executed = self.binding.table(), description(self.binding, self.arms, self.schedule.kind)
        collision = self.controller.collision
        checks = [f"check {warning}" for warning in self.warnings]
        return "\n".join([table, executed, *([collision.describe()] if collision else []), *checks])


def build_pipeline(config: Config, spec: PolicySpec) -> ActionPipeline:
    """Bind a source's spec to the robot and the options; the source need not be loaded.

    Raises ConfigError if they do not fit together.
    """
    arms = make_arms(config)
    binding = bind(spec, config, arms)
    kinematics = {name: arm.kinematics for name, arm in arms.items() if arm.kinematics is not None}
    collision = CollisionCheck(binding.config, kinematics)
    controller = RobotController(binding.config, binding.spec, kinematics, collision)
    schedule = ActionSchedule(binding.config.control, binding.spec, controller.binary, controller.rotations)
    return ActionPipeline(binding, Observer(binding), schedule, controller, arms)
