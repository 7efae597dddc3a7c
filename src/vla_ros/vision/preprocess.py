"""One camera message to one picture for the policy: decode, turn upright, resize as in training."""

from __future__ import annotations

from dataclasses import dataclass

from vla_ros.config.tree import CameraConfig
from vla_ros.errors import ConfigError
from vla_ros.types import CameraFrame, UInt8Array
from vla_ros.vision.decode import Frame, decode_compressed, decode_image
from vla_ros.vision.geometry import make_orientation
from vla_ros.vision.messages import CdrBytes
from vla_ros.vision.pipelines import make_pipeline


@dataclass(frozen=True, eq=False)
class Prepared:
    """A picture as the checkpoint saw it in training.

    Attributes:
        image: Uint8 [height, width, 3] RGB of the policy's image size.
        stamp: Nanoseconds of the ROS clock at exposure.
        original_size: (height, width) of the camera's picture, before orientation.
        frame: The decoded picture itself; None where `Preprocessor.prepare` was given one.
    """

    image: UInt8Array
    stamp: int
    original_size: tuple[int, int]
    frame: Frame | None = None


class Preprocessor:
    """What ``camera`` of the configuration says is done to every frame; one for the live node and replay.

    It keeps no state between frames and may be called from several threads.
    """

    def __init__(self, camera: CameraConfig, image_size: tuple[int, int] = (224, 224)) -> None:
        """Prepare for all cameras of ``camera``.

        Args:
            camera: Section of the configuration.
            image_size: (height, width) that the policy expects (``ActionSpec.image_size``).

        Raises:
            ConfigError: Transport, pipeline or an orientation is unknown, the crop area is out of range, or there
                are neither one orientation nor as many as cameras.
        """
        count = len(camera.topics)
        orientations = camera.orientation * count if len(camera.orientation) == 1 else camera.orientation
        if len(orientations) != count:
            raise ConfigError(
                f"camera.orientation: found {len(orientations)} entries for {count} camera topics, expected one for"
                " all or one each"
            )
        decoders = {"raw": decode_image, "compressed": decode_compressed}
        if camera.transport not in decoders:
            raise ConfigError(f"camera.transport: found {camera.transport!r}, expected raw or compressed")
        self._decode = decoders[camera.transport]
        self._camera = camera
        self._orientations = orientations
        self._turns = [make_orientation(name) for name in orientations]
        self._pipeline = make_pipeline(camera.pipeline, image_size, camera.crop_area)

    def __call__(self, cdr: CdrBytes, camera_index: int = 0) -> Prepared:
        """Prepare one serialised ``sensor_msgs/Image`` or ``CompressedImage``, as ``camera.transport`` says.

        Args:
            cdr: The message as it came from the wire, with its encapsulation header.
            camera_index: Position of the camera in ``camera.topics``.

        Raises:
            ImageError: The message holds no picture that can be used; the text says why.
        """
        frame = self.decode(cdr)
        image = self.prepare(frame.image, camera_index)
        height, width, _ = frame.image.shape
        return Prepared(image, frame.stamp, (height, width), frame)

    def decode(self, cdr: CdrBytes) -> Frame:
        """The picture in a serialised message, as the camera gave it; :meth:`prepare` does the rest.

        Raises:
            ImageError: As calling the preprocessor.
        """
        return self._decode(cdr)

    def unprepared(self, image: UInt8Array, camera_index: int = 0) -> CameraFrame:
        """A decoded picture with what :meth:`prepare` would do to it, for whoever does that elsewhere."""
        return CameraFrame(image, self._orientations[camera_index], self._camera.pipeline, self._camera.crop_area)

    def prepare(self, image: UInt8Array, camera_index: int = 0) -> UInt8Array:
        """Prepare a decoded picture: orientation, then the pipeline.

        Args:
            image: Uint8 [H, W, 3] RGB as the camera gave it.
            camera_index: Position of the camera in ``camera.topics``.

        Returns:
            Uint8 [height, width, 3] RGB of the policy's image size.

        Raises:
            ImageError: ``image`` is not uint8 [H, W, 3] with pixels.
        """
        return self._pipeline(self._turns[camera_index](image))
