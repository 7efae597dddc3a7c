"""Follows one publisher per camera topic and checks that its frames stay consistent."""

from vla_ros.config import CameraConfig
from vla_ros.control.clock import Now
from vla_ros.control.publishers import CompetingSources, DataSource, DataSources
from vla_ros.node.context import Context
from vla_ros.vision.messages import CdrBytes, image_header, read_compressed, shown


class CameraSources:
    """Distinguishes the frames of several sources, and warns of unexpected frames once per topic."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sources = DataSources()
        self._known: dict[str, set[str]] = {}

    def competing(self, steady: int) -> CompetingSources | None:
        """Return two sources whose frames alternate on a topic (its subject), or None."""
        return self._sources.competing(steady)

    def follows(self, topic: str, data: CdrBytes, publisher: bytes, now: Now) -> bool:
        """Return True if a frame comes from the followed source."""
        config = self._context.options.current
        kind = _kind(data, config.camera.transport)
        if not self._sources.follows(topic, DataSource(publisher, kind), now.steady, config.timeouts.camera):
            return False
        self._warn(topic, kind, config.camera)
        return True

    def _warn(self, topic: str, kind: str, camera: CameraConfig) -> None:
        """Warn once of an unexpected size, and once if the frames of a topic change."""
        known = self._known.setdefault(topic, set())
        if kind in known or len(known) > 1:
            return
        size = next(f"{each.width}x{each.height}" for each in camera.each if each.topic == topic)
        if known:
            self._context.logger.warning(f"{topic}: its frames were {next(iter(known))} and are {kind} now")
        elif camera.transport == "raw" and not kind.startswith(f"{size} "):
            text = f"{topic}: its frames are {kind}; camera.width and camera.height expect {size}"
            self._context.logger.warning(text)
        known.add(kind)


def _kind(data: CdrBytes, transport: str) -> str:
    """Describe the size, encoding and frame id of a frame."""
    if transport == "compressed":
        compressed = read_compressed(data)[0]
        return f"{shown(compressed.format)} (frame_id {shown(compressed.frame_id)})"
    header = image_header(data)
    size, encoding = f"{header.width}x{header.height}", shown(header.encoding)
    return f"{size} {encoding} (frame_id {shown(header.frame_id)})"
