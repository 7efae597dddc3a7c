"""Which publisher of a camera's topic is followed, and what its frames have in common."""

from __future__ import annotations

from vla_ros.config import CameraConfig
from vla_ros.control.clock import Now
from vla_ros.control.sources import Contest, Source, Sources
from vla_ros.node.context import Context
from vla_ros.vision.messages import CdrBytes, image_header, read_compressed, shown


class CameraSources:
    """Tells frames of one source from those of another, and warns of each topic's unexpected frames once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sources = Sources()
        self._known: dict[str, set[str]] = {}

    def contest(self, steady: int) -> Contest | None:
        """Two that send frames on one topic in turn at this time of the steady clock; the subject is the topic."""
        return self._sources.contest(steady)

    def follows(self, topic: str, data: CdrBytes, publisher: bytes, now: Now) -> bool:
        """Whether a frame comes from the source that is followed.

        Raises:
            ImageError: Its header cannot be read.
        """
        config = self._context.options.current
        kind = _kind(data, config.camera.transport)
        if not self._sources.follows(topic, Source(publisher, kind), now.steady, config.timeouts.camera):
            return False
        self._warn(topic, kind, config.camera)
        return True

    def _warn(self, topic: str, kind: str, camera: CameraConfig) -> None:
        """Warn once of a size that is not the expected one, and once of frames that are others than before."""
        known = self._known.setdefault(topic, set())
        if kind in known or len(known) > 1:
            return
        size = next(f"{each.width}x{each.height}" for each in camera.each if each.topic == topic)
        if known:
            self._context.logger.warning(f"{topic}: its frames were {next(iter(known))} and are {kind} from now on")
        elif camera.transport == "raw" and not kind.startswith(f"{size} "):
            text = f"{topic}: its frames are {kind}; camera.width and camera.height expect {size}"
            self._context.logger.warning(text)
        known.add(kind)


def _kind(data: CdrBytes, transport: str) -> str:
    """Size, encoding and frame id of a frame, for people."""
    if transport == "compressed":
        compressed = read_compressed(data)[0]
        return f"{shown(compressed.format)} (frame_id {shown(compressed.frame_id)})"
    header = image_header(data)
    size, encoding = f"{header.width}x{header.height}", shown(header.encoding)
    return f"{size} {encoding} (frame_id {shown(header.frame_id)})"
