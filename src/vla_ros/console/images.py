"""The newest image of each camera, and of what the policy sees, as JPEG for the page."""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import cv2
import numpy as np

from vla_ros.errors import VlaRosError
from vla_ros.graph.origin import Origin
from vla_ros.graph.wiring import Wiring
from vla_ros.vision.decode import decode_compressed, decode_image
from vla_ros.vision.messages import IMAGE_TYPES

_WIDEST, _QUALITY = 960, 80
_NICE = 10  # the node, and a stop, go first


def _lower() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


ENCODER = ThreadPoolExecutor(1, "vla_console_images", initializer=_lower)
"""The thread on which images are decoded and encoded, at a lower priority than the others of this process."""


class Feeds:
    """Keeps the newest message of each topic, serialised. Subscribe on the thread that spins."""

    def __init__(self, graph: Any, node: Any) -> None:
        self._graph, self._node = graph, node
        self._wiring: Wiring | None = None
        self._newest: dict[str, tuple[int, Any]] = {}  # by topic: a count, and CDR bytes
        self._encoded: dict[str, tuple[int, bytes]] = {}
        self._types: dict[str, str] = {}
        self.names: Sequence[str] = ()

    def watch(self, cameras: Mapping[str, str], debug: str) -> None:
        """Subscribe to the cameras, topics with the types of their messages, and to the debug image, once."""
        types = {**cameras, debug: IMAGE_TYPES["raw"]}
        if self._wiring is not None and types == self._types:
            return
        self.close()
        if not cameras or not set(cameras.values()) <= set(IMAGE_TYPES.values()):
            return
        self._wiring, self._types, self.names = Wiring(self._graph, self._node), types, list(types)
        for topic, type_name in types.items():
            self._wiring.subscribe_raw(type_name, topic, partial(self._on_image, topic), "camera")

    def close(self) -> None:
        if self._wiring is not None:
            self._wiring.close()
        self._wiring, self._newest, self._encoded, self.names = None, {}, {}, ()

    def _on_image(self, topic: str, cdr: Any, _: Origin) -> None:
        self._newest[topic] = self._newest.get(topic, (0, b""))[0] + 1, bytes(cdr)

    def newer(self, topic: str, than: int) -> tuple[int, bytes] | None:
        """Return the number and the JPEG of the newest image if it is newer; call it on :data:`ENCODER`."""
        number, cdr = self._newest.get(topic, (0, b""))
        if number <= than:
            return None
        known = self._encoded.get(topic, (0, b""))
        if known[0] != number:
            known = self._encoded[topic] = number, _jpeg(cdr, self._types.get(topic, ""))
        return known


def _jpeg(cdr: Any, kind: str) -> bytes:
    """Return an image as JPEG, at most 960 pixels wide; b"" if it cannot be decoded, which the node says itself."""
    try:
        image = (decode_image if kind == IMAGE_TYPES["raw"] else decode_compressed)(cdr).image
    except VlaRosError:
        return b""
    height, width = image.shape[:2]
    if width > _WIDEST:
        size = _WIDEST, max(1, round(height * _WIDEST / width))
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    done, data = cv2.imencode(".jpg", np.ascontiguousarray(image[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return bytes(data) if done else b""
