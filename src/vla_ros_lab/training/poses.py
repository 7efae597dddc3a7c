"""Where the depth cameras of recordings were, for samples in any order and in other processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vla_ros.kinematics.transforms import TransformBuffer
from vla_ros.node.depth import DepthCameras
from vla_ros.types import FloatArray
from vla_ros.vision.camera_model import CameraModel


@dataclass(frozen=True)
class CameraPoses:
    """What one recording said of its depth cameras: no more than their images need."""

    models: Mapping[str, CameraModel | str] = field(default_factory=dict)  # by topic of CameraInfo
    at: dict[tuple[str, str, int], FloatArray] = field(default_factory=dict)  # [4, 4] by target, source and stamp

    def show(self, cameras: DepthCameras) -> None:
        """Let ``cameras`` compute the points of this recording."""
        cameras.models, cameras.transforms = dict(self.models), _Known(self, None)


def gather_poses(cameras: DepthCameras) -> CameraPoses:
    """Return the poses that ``cameras`` will look up from now on, and the models that it has."""
    found = CameraPoses(cameras.models)
    cameras.transforms = _Known(found, cameras.transforms)
    return found


class _Known(TransformBuffer):
    """Answers what was asked before, and adds other answers of ``source``."""

    def __init__(self, poses: CameraPoses, source: TransformBuffer | None) -> None:
        super().__init__()
        self._poses, self._source = poses, source

    def at(self, target: str, source: str, stamp: int) -> FloatArray:
        if (key := (target, source, stamp)) not in self._poses.at and self._source is not None:
            self._poses.at[key] = self._source.at(*key)
        return self._poses.at[key]
