"""Decides whether the arm may move (disarmed, armed, holding or stopped), who may move it, and why.

Nothing moves until armed. A reason of level hold keeps the arm where it is until that reason has ended; a
reason of level stop keeps it there until a person resets. The first stop wins: later reasons are only counted.
After a reset the arm is disarmed; arming it again is a separate request.

A person may take over an armed arm (:class:`Mode`), which neither arms nor ends a stop.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from vla_ros.control.clock import Clock
from vla_ros.control.mode import NOBODY, PERSON, POLICY, Mode
from vla_ros.control.reasons import LIMITS, OF_PERSON, OF_POLICY, Level, Reason


class State(str, Enum):
    """What the arm may do.

    ``DISARMED``: no command is sent. ``ARMED``: it moves. ``HOLDING``: armed, but kept at its last measured
    position while a reason lasts. ``STOPPED``: kept there until a person resets.
    """

    DISARMED = "disarmed"
    ARMED = "armed"
    HOLDING = "holding"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Status:
    """A consistent snapshot of the state."""

    state: State  # what the arm may do
    stopped_by: Reason | None  # first reason to stop, or None
    detail: str  # detail of that reason
    holds: Mapping[Reason, str]  # reasons that hold an armed arm, with their details
    blocks: Mapping[Reason, str]  # active reasons to stop, which prevent arming, with their details
    mode: Mode  # who may move it
    source: str  # who moves it now: ``policy``, ``person`` or ``nobody``


@dataclass(frozen=True)
class Event:
    """A change of state or of a reason."""

    # ``arm``, ``disarm``, ``hold``, ``clear``, ``stop``, ``reset``; ``block`` and ``unblock`` if a reason to stop
    # begins or ceases to prevent arming; ``source`` if the mode or the source has changed.
    kind: str
    before: State  # state before the event
    after: State  # state after the event
    reason: Reason | None  # None for ``arm``, ``disarm``, ``reset`` and ``source``
    detail: str  # what was found
    stamp: int  # nanoseconds of the injected clock


_LOG = logging.getLogger(__name__)
_SYSTEM_CLOCK = Clock()

Listener = Callable[[Event], None]


class Safety:
    """Decides whether the arm may move. Thread-safe; methods wait only during :meth:`sending`."""

    def __init__(self, clock: Callable[[], int] = _SYSTEM_CLOCK.ros) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._sending = 0  # contexts of sending() that are open; events are delivered after them
        self.remark, self._armed = "", False  # remark: why an armed arm may hardly move, for explain()
        self._armings = 0
        self._interruptions = 0
        self._mode, self._handovers, self._live = Mode.AUTONOMOUS, 0, False
        self._stop: Reason | None = None
        self._stop_detail = ""
        self._held: dict[Reason, str] = {}  # by callers of hold(), until clear()
        self._found: dict[Reason, str] = {}  # by the watchdog, until follow()
        self._blocked: dict[Reason, str] = {}
        self._counters: Counter[str] = Counter()
        self._state, self._was_free = State.DISARMED, False
        self._listeners: tuple[Listener, ...] = ()
        self._events: deque[Event] = deque()
        self._delivering = threading.Lock()

    @property
    def state(self) -> State:
        return self._state

    @property
    def may_move(self) -> bool:
        """True if a motion may be sent now; :meth:`sending` keeps this true while it is sent."""
        return self._state is State.ARMED

    @property
    def armings(self) -> int:
        """Number of armings. Work that began at a smaller number began before motion was allowed."""
        return self._armings

    @property
    def interruptions(self) -> int:
        """Number of holds, stops and disarms that ended motion; earlier plans are void.

        Reasons of a person's input do not count: they hold an arm that rests already.
        """
        return self._interruptions

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def handovers(self) -> int:
        """Number of changes of the mode, and of releases of a person's input; earlier commands are void."""
        return self._handovers

    @property
    def is_free(self) -> bool:
        """True if the arm is armed, and nothing but a person's own input holds it."""
        own = OF_PERSON if self._mode is Mode.CORRECTING else frozenset[Reason]()
        return self._armed and self._stop is None and not self._holds.keys() - own

    @property
    def source(self) -> str:
        if self._state is State.ARMED and self._mode is Mode.AUTONOMOUS:
            return POLICY
        return PERSON if self._state is State.ARMED and self._live else NOBODY

    @property
    def status(self) -> Status:
        """The state and its reasons, consistent with each other."""
        with self._lock:
            holds, blocks = MappingProxyType(self._holds), MappingProxyType(dict(self._blocked))
            return Status(self._state, self._stop, self._stop_detail, holds, blocks, self._mode, self.source)

    @property
    def counters(self) -> Mapping[str, int]:
        """Number of times that each reason was reported, by the reason's value."""
        with self._lock:
            return dict(self._counters)

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with every later event, in order; the listener may call this object."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Context in which a motion is sent; yields :attr:`may_move`.

        Stops and holds wait until the context ends, so keep it short. Once :meth:`stop` has returned, no motion is
        sent.

            with safety.sending() as allowed:
                if allowed:
                    publisher.publish(message)
        """
        try:
            with self._lock:
                self._sending += 1
                try:
                    yield self.may_move
                finally:
                    self._sending -= 1
        finally:
            self._deliver()

    def arm(self) -> bool:
        """Allow motion; return False if the arm is stopped or a reason to stop is active (:meth:`explain`)."""
        with self._lock:
            if self._stop is not None or self._blocked:
                return False
            self._armings += not self._armed
            self._armed = True
            self._changed("arm")
        self._deliver()
        return True

    def disarm(self) -> None:
        """Forbid motion; a stopped arm remains stopped."""
        with self._lock:
            self._armed = False
            self._changed("disarm")
        self._deliver()

    def take_over(self, mode: Mode) -> str:
        """Let another one move the arm; return why not if it is stopped or disarmed, else "".

        Once this has returned, no command that was made before is sent.
        """
        with self._lock:
            if self._stop is not None or not self._armed:
                return f"refused: {self.explain()}"
            if mode is not self._mode:
                self._hand_over(mode)
                self._changed("source")
        self._deliver()
        return ""

    def release(self) -> None:
        """A person lets go of the input: once this has returned, no command that was made before is sent."""
        with self._lock:
            if self._live:
                self._handovers, self._live = self._handovers + 1, False
                self._changed("source")
        self._deliver()

    def go_live(self, handovers: int) -> bool:
        """A person's input moves the arm from now on; return False if :attr:`handovers` has changed."""
        with self._lock:
            if self._mode is not Mode.CORRECTING or handovers != self._handovers:
                return False
            for reason in OF_PERSON:
                self._clear(self._held, reason)
            if not self._live:
                self._live = True
                self._changed("source")
        self._deliver()
        return True

    def hold(self, reason: Reason, detail: str = "") -> None:
        """Hold for ``reason`` until :meth:`clear`; calling it again only updates the detail.

        Raises ValueError if the reason's level is not hold.
        """
        _expect(reason, Level.HOLD)
        with self._lock:
            self._hold(self._held, reason, detail)
        self._deliver()

    def clear(self, reason: Reason) -> None:
        """Clear a reason of :meth:`hold`, unless the watchdog has found it as well.

        Clearing the last one lets an armed arm move again.
        """
        with self._lock:
            self._clear(self._held, reason)
        self._deliver()

    def stop(self, reason: Reason, detail: str = "") -> bool:
        """Stop until a person resets; return True if this is the first reason.

        Later reasons are only counted. Raises ValueError if the reason's level is not stop.
        """
        _expect(reason, Level.STOP)
        with self._lock:
            first = self._halt(reason, detail)
        self._deliver()
        return first

    def react(self, reason: Reason, detail: str = "") -> None:
        """React according to the reason's level: count it, hold or stop.

        A hold lasts until :meth:`follow`: call :meth:`hold` for one that the watchdog does not know. While the arm
        is disarmed, violated limits are only counted, so that the policy can be watched before arming.
        """
        with self._lock:
            if reason.level is Level.HOLD:
                self._hold(self._found, reason, detail)
            elif reason.level is Level.STOP and (self._armed or reason not in LIMITS):
                self._halt(reason, detail)
            else:
                self._counters[reason.value] += 1
        self._deliver()

    def count(self, reason: Reason) -> None:
        """Count a reason that holds only one of several arms (``control.arms_hold_alone``)."""
        with self._lock:
            self._counters[reason.value] += 1

    def follow(self, active: Mapping[Reason, str]) -> None:
        """Hold or stop for a watchdog's ``active`` reasons, and clear its holds that have ended.

        While disarmed, a reason to stop only prevents arming. Reasons of :meth:`hold` remain until :meth:`clear`.
        """
        with self._lock:
            for reason in [found for found in self._found if found not in active]:
                self._clear(self._found, reason)
            before, self._blocked = self._blocked, {}
            for reason, detail in active.items():
                if reason.level is Level.HOLD:
                    self._hold(self._found, reason, detail)
                    continue
                self._blocked[reason] = detail
                if self._armed:
                    self._halt(reason, detail)
                    continue
                # Discovery may report a publisher before its node. Other details differ only in elapsed time.
                named = reason is Reason.COMMAND_CONTESTED and before.get(reason, detail) != detail
                if named and self._stop is reason:
                    self._stop_detail = detail
                if named or reason not in before:
                    self._changed("block", reason, detail)
            for reason in before:
                if reason not in self._blocked:
                    self._changed("unblock", reason)
        self._deliver()

    def explain(self) -> str:
        """Return the state and what to do about it, in one line."""
        with self._lock:
            if self._stop is not None:
                return f"stopped by {_say(self._stop, self._stop_detail)}; fix the cause, reset, then arm"
            reasons = "; ".join(_say(reason, detail) for reason, detail in {**self._blocked, **self._holds}.items())
            who = "" if self._mode is Mode.AUTONOMOUS else f"{self._mode.value}, "
            if self._state is State.DISARMED:
                return f"disarmed{'; waiting for: ' + reasons if reasons else ''}"
            return f"{who}holding: {reasons}" if reasons else f"{who}armed{self.remark and '; ' + self.remark}"

    def reset(self) -> bool:
        """End a stop on a person's request and disarm; return False if the arm was not stopped."""
        with self._lock:
            if self._stop is None:
                return False
            self._stop, self._stop_detail = None, ""
            self._changed("reset")
        self._deliver()
        return True

    @property
    def _holds(self) -> dict[Reason, str]:
        """Return the reasons that hold the arm in this mode: the policy's hold no person, a person's no policy."""
        others = OF_PERSON if self._mode is Mode.AUTONOMOUS else OF_POLICY
        return {why: detail for why, detail in {**self._found, **self._held}.items() if why not in others}

    def _hand_over(self, mode: Mode) -> None:
        self._mode, self._live, self._handovers = mode, False, self._handovers + 1
        self._held = {reason: detail for reason, detail in self._held.items() if reason not in OF_PERSON}

    def _hold(self, holds: dict[Reason, str], reason: Reason, detail: str) -> None:
        jumped = reason is Reason.CLOCK_JUMP and holds.get(reason) != detail  # again
        began, holds[reason] = jumped or not (reason in self._found or reason in self._held), detail
        if began:
            self._counters[reason.value] += 1
            self._changed("hold", reason, detail)

    def _clear(self, holds: dict[Reason, str], reason: Reason) -> None:
        if holds.pop(reason, None) is not None and reason not in self._found and reason not in self._held:
            self._changed("clear", reason)

    def _halt(self, reason: Reason, detail: str) -> bool:
        self._counters[reason.value] += 1
        if self._stop is not None:
            return False
        self._stop, self._stop_detail, self._armed = reason, detail, False
        self._changed("stop", reason, detail)
        return True

    def _changed(self, kind: str, reason: Reason | None = None, detail: str = "") -> None:
        """Update the state and queue an event. The caller holds the lock."""
        before, was_free = self._state, self._was_free
        if not self._armed and self._mode is Mode.CORRECTING:
            self._hand_over(Mode.PAUSED)
        if self._stop is not None:
            self._state = State.STOPPED
        elif not self._armed:
            self._state = State.DISARMED
        else:
            self._state = State.HOLDING if self._holds else State.ARMED
        self._was_free = self.is_free
        self._interruptions += was_free and not self._was_free
        self._live = self._live and self._was_free
        if self._listeners:
            self._events.append(Event(kind, before, self._state, reason, detail, self._clock()))

    def _deliver(self) -> None:
        """Call the listeners in order, without the lock, on one thread at a time.

        The outer loop handles events that were added while another thread was about to finish.
        """
        while self._events and not self._sending and self._delivering.acquire(blocking=False):
            try:
                while self._events:
                    event = self._events.popleft()
                    for listener in self._listeners:
                        _tell(listener, event)
            finally:
                self._delivering.release()


def _tell(listener: Listener, event: Event) -> None:
    try:
        listener(event)
    except Exception:  # a failing listener must not prevent a stop
        _LOG.exception("a listener failed on %s", event)


def _expect(reason: Reason, level: Level) -> None:
    if reason.level is not level:
        raise ValueError(f"{reason.value} is a reason to {reason.level.value}, not to {level.value}")


def _say(reason: Reason, detail: str) -> str:
    return f"{reason.value} ({detail or reason.description})"
