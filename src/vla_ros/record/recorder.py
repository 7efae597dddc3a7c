"""The recorder: a node that gets what another node receives and sends, and a thread that writes it."""

import json
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any

from vla_ros.config.record import RecordConfig
from vla_ros.errors import VlaRosError
from vla_ros.graph.node import Graph, printable_logger
from vla_ros.graph.origin import Origin
from vla_ros.graph.wiring import Wiring
from vla_ros.record.bag import BagWriter, repair, unfinished
from vla_ros.record.ring import Ring
from vla_ros.record.selection import Mark, Selection
from vla_ros.record.topics import EVENT_QOS, LATCHED, Recorded, Topic, recorder_name
from vla_ros.telemetry.diagnostics import ERROR, OK, WARN, PartStatus, diagnostic_array

_PERIOD = 0.1  # s between writes: a killed process loses the messages of two periods at most
_LOOKS = 0.05  # s between looks into the ring
_SILENT = 6  # reports, one a second, until a person is told that there are no messages
_SYNC = 1.0  # s between requests that the disk keeps what was written


class BagFolder:
    """Writes bags in a folder, named after the time. Call it from one thread; any thread may read the figures.

    Whatever fails, such as a full disk or a folder that is removed, ends the bag and is the ``error``; the next bag
    is tried.
    """

    def __init__(self, folder: Path, topics: Sequence[Topic], logger: Logger) -> None:
        self._folder, self._topics, self._logger = folder, topics, logger
        self._texts = {topic.name for topic in topics if topic.qos in LATCHED}
        self._bag: BagWriter | None = None
        self._waiting: list[Recorded] = []  # texts alone begin no bag
        self._synced = 0.0  # monotonic, s
        self._failed = False  # until the next bag
        self._kept = 0  # messages of the bag that is open
        self.path = ""  # of the bag, or the last one
        self.error = ""
        self.messages = self.bytes = self.lost = 0

    def repair(self) -> None:
        """Finish the bags that a killed recorder left."""
        for path in unfinished(self._folder):
            self._repair(path)

    def _repair(self, path: Path) -> None:
        try:
            self._logger.info(repair(path))
        except Exception as error:  # whatever is wrong with it, what follows is recorded
            self._logger.warning(f"{path}: not repaired: {_say(error)}")

    def write(self, items: Sequence[Recorded | Mark]) -> None:
        for item in items:
            if isinstance(item, Recorded):
                self._waiting.append(item)
            else:
                self._write()
                self.close(discard=item is Mark.DISCARD)
        self._write()

    def close(self, *, discard: bool = False) -> None:
        """End the bag that is open."""
        bag, self._bag, self._waiting, self._failed = self._bag, None, [], False
        if bag is None:
            return
        why = ""
        try:
            bag.close()
        except Exception as error:
            why = _say(error)
        if discard:
            shutil.rmtree(bag.path, ignore_errors=True)
            if os.path.lexists(bag.path):
                self._logger.error(f"{bag.path} could not be removed")
            else:
                self._logger.info(f"discarded {bag.path}")
        elif why:
            self.error = self.error or f"the bag is not complete: {why}"
            kept = (
                "repair it with `vla-ros record --repair`" if os.path.lexists(bag.path) else "nothing is left of it"
            )
            self._logger.error(f"{bag.path} is not complete: {why}; {kept}")
        else:
            self._logger.info(f"recorded {bag.path}")

    def fail(self, error: BaseException, lost: int = 0) -> None:
        """End the bag because of an error, which is reported with ``lost`` further messages."""
        self.lost += lost
        self.error = f"recording has stopped: {_say(error)}"
        self._logger.error(f"{self._folder}: {self.error}; ~/record begins another bag")
        self.close()
        self._failed = True

    def _write(self) -> None:
        waiting = self._waiting
        if self._bag is None and all(message.topic in self._texts for message in waiting):
            return
        self._waiting = []
        if self._failed:
            self.lost += len(waiting)
            return
        try:
            if self._bag is None:
                self._bag = BagWriter(self._new_path(), self._topics)
                self.path, self.error, self._kept = str(self._bag.path), "", 0
            self._bag.write(waiting)
            if time.monotonic() - self._synced >= _SYNC:
                self._bag.sync()
                self._synced = time.monotonic()
        except Exception as error:
            gone, self._kept = (self._kept if self._bag is not None and self._bag.is_removed else 0), 0
            self.messages -= gone
            self.fail(error, len(waiting) + gone)
        else:
            self._kept += len(waiting)
            self.messages += len(waiting)
            self.bytes += sum(len(message.data) for message in waiting)

    def _new_path(self) -> Path:
        name = time.strftime("%Y_%m_%d-%H_%M_%S")
        number, path = 0, self._folder / name
        while os.path.lexists(path):
            number, path = number + 1, self._folder / f"{name}_{number + 1}"
        return path


def _say(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, VlaRosError) else f"{type(error).__name__}: {error}"


class Recorder:
    """Records the topics of the node called ``node``; callbacks run on the thread that spins ``graph``.

    Messages come from the ring that the node writes, or from subscriptions if there is none.
    """

    def __init__(
        self, graph: Graph, node: str, options: RecordConfig, topics: Sequence[Topic], ring: Ring | None = None
    ) -> None:
        namespace, _, base = recorder_name(node).rpartition("/")
        self._node = graph.create_node(base, namespace or "/")
        self._logger = printable_logger(self._node.get_logger())
        self._text = graph.message("std_msgs/msg/String")
        self._wiring = wiring = Wiring(graph, self._node)
        self._what = options.what
        self._selection = Selection(options, [topic.name for topic in topics if topic.qos in LATCHED])
        self._bags = BagFolder(Path(options.folder), topics, self._logger)
        self._lock = threading.Lock()  # of the selection
        self._events = {topic.name for topic in topics if topic.qos == EVENT_QOS}
        self._misread = False  # a message on a topic of events was none, and was named
        self._ring, self._source, self._silent = ring, node, _SILENT * (ring is None)
        if ring is None:
            self._logger.info(f"records {len(topics)} topics of {node} in {options.folder}, until Ctrl-C")
            for topic in topics:
                profile = EVENT_QOS if topic.qos in LATCHED else "recorder"
                wiring.subscribe_raw(topic.type, topic.name, partial(self._on_message, topic.name), profile)
        else:
            wiring.timer(_LOOKS, self._look)
        wiring.service("std_srvs/srv/SetBool", "~/record", self._on_record)
        self._diagnostics = wiring.teller("diagnostic_msgs/msg/DiagnosticArray", "/diagnostics", "diagnostics")
        wiring.timer(1.0, self._report)
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write, name="vla_record", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write what was received, and finish the bag."""
        try:
            self._look()
            self._wiring.close()
        finally:
            self._ended.set()
            self._writer.join()

    @property
    def report(self) -> PartStatus:
        """Return the part ``recording`` of the diagnostics."""
        bags, dropped = self._bags, self._selection.dropped
        values = {"bag": bags.path, "messages": str(bags.messages), "bytes": str(bags.bytes)}
        values |= {f"dropped/{topic}": str(count) for topic, count in sorted(dropped.items())}
        count = dropped.total() + bags.lost
        if bags.error:
            return PartStatus("recording", ERROR, f"{bags.error}; {count} messages were lost", values)
        state = f"recording {self._what}" if self._selection.is_open else f"waiting ({self._what})"
        return PartStatus("recording", WARN if count else OK, f"{state}; {count} messages were lost", values)

    def _on_message(self, topic: str, cdr: bytes | memoryview, origin: Origin) -> None:
        now, self._silent = time.time_ns(), 0
        self._keep(Recorded(now, origin.published or now, topic, cdr))

    def _look(self) -> None:
        if self._ring is None:
            return
        for message in self._ring.read():
            self._keep(message)
        with self._lock:
            for topic, count in self._ring.take_dropped().items():
                self._selection.miss(topic, count)

    def _keep(self, message: Recorded) -> None:
        with self._lock:
            self._selection.add(message)
            if message.topic in self._events and (event := self._read(message)):
                self._selection.hear(event, message.time)

    def _read(self, message: Recorded) -> dict[str, Any]:
        """Return an event, or {} if the message is none: anything may be published on its topic."""
        try:
            return dict(json.loads(self._wiring.graph.deserialize(message.data, self._text).data))
        except Exception as error:  # a middleware raises whatever it likes on damaged bytes, and so does JSON
            if not self._misread:
                self._misread = True
                self._logger.warning(f"{message.topic}: not an event: {type(error).__name__}: {error}")
            return {}

    def _on_record(self, request: Any, response: Any) -> Any:
        if self._what not in ("all", "last"):
            response.success, response.message = False, f"refused: record.what is {self._what}"
            return response
        self._look()
        with self._lock:
            if request.data:
                self._selection.begin(time.time_ns())
            else:
                self._selection.end()
        response.success, response.message = True, "recording" if request.data else "the bag is being finished"
        return response

    def _report(self) -> None:
        self._silent -= self._silent > 0
        if self._silent == 1:
            wait = f"within {_SILENT - 1} s; is it running, and in this domain (vla-ros status)?"
            self._logger.warning(f"nothing came on any topic of {self._source} {wait}")
        now = int(self._node.get_clock().now().nanoseconds)
        name = self._node.get_fully_qualified_name()
        self._diagnostics.publish(diagnostic_array([self.report], name, now, self._wiring.graph.message))

    def _write(self) -> None:
        self._guarded(self._bags.repair)
        while not self._ended.wait(_PERIOD):
            self._guarded(self._write_taken)
        self._guarded(self._write_taken)
        self._guarded(self._bags.close)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something on the thread that writes; report what it raises: the thread never ends unnoticed."""
        try:
            act()
        except Exception as error:
            self._logger.error(traceback.format_exc())
            self._bags.fail(error)

    def _write_taken(self) -> None:
        with self._lock:
            taken = self._selection.take()
        try:
            self._bags.write(taken)
        except Exception as error:
            self._bags.fail(error, sum(isinstance(item, Recorded) for item in taken))
