"""pi0 and pi0.5 as a :class:`~vla_ros.policies.base.Policy`."""

from dataclasses import replace
from typing import Any

from vla_ros.config import Config
from vla_ros.policies.base import Progress
from vla_ros_models.flow_policy import FlowPolicy, LoadedFlow
from vla_ros_models.network_policy import Placement
from vla_ros_models.pi import PiOptions
from vla_ros_models.pi.checkpoint import PiCheckpoint, read_checkpoint
from vla_ros_models.pi.inference import load_model
from vla_ros_models.pi.processing import ROBOTS, find_robot, override
from vla_ros_models.training import Trainable


class PiPolicy(FlowPolicy[PiCheckpoint]):
    """Runs pi0 and pi0.5.

    With openpi's layout, images and state vectors have the names that openpi's own server expects from this robot
    (``observation/image``); with LeRobot's layout, the names in ``config.json`` without ``observation.`` and
    ``images.``.
    """

    Options = PiOptions
    title = "pi"
    _options: PiOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._preset = ROBOTS.get(config.preset)

    def _read(self) -> PiCheckpoint:
        options = self._options
        robot = find_robot(options.robot) if options.robot else None
        checkpoint = read_checkpoint(self.folder, robot, options.asset, self._preset, options.base)
        processing = override(checkpoint.processing, options.prompt_state, options.resize)
        return replace(checkpoint, processing=processing)

    def _load(self, checkpoint: PiCheckpoint, where: Placement, progress: Progress) -> LoadedFlow:
        options, device = self._options, str(where.device)
        steps, words, jacobian = options.flow_steps, options.tokenizer, options.rtc == "jacobian"
        return load_model(checkpoint, device, where.dtype, steps, words, progress, options.quantization, jacobian)

    def trainable(self, where: Placement, recompute_layers: bool = True, **options: Any) -> Trainable:
        from vla_ros_models.pi.training import make_trainable

        words, found = self._options.tokenizer, self._read()
        self._require_teacher(found.distilled)
        return make_trainable(found, str(where.device), where.dtype, recompute_layers, words, **options)
