"""Receives camera frames under rclpy without an extra copy in Python.

rclpy's raw subscription copies each message from the rmw's buffer into a new ``bytes`` while it holds the
interpreter lock. Here ``rcl_take_serialized_message`` (rcl/subscription.h) is called through ctypes: the rmw writes
into a buffer of this process without the lock, and the callback gets a view of it. A buffer is reused once no view
is left. The subscription is in a callback group that never runs; a ``Waitable`` takes its messages.
A frame of 1920x1080 takes 0.6 times as long as with rclpy's own raw subscription on Cyclone DDS
(docs/middleware.md).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.waitable import NumberOfEntities, Waitable

from vla_ros.graph.node import RawSubscription
from vla_ros.graph.origin import Origin

BLOCK = "VLA_ROS_PUBLIC_RCLPY"
"""Environment variable; set, it has :mod:`vla_ros.graph.rclpy_public` used instead."""
KNOWN_STRUCTS = ("humble", "iron", "jazzy", "kilted", "lyrical")
"""Distributions whose structs are those below."""

_OK = 0  # RCL_RET_OK
_NOTHING_THERE = 401  # RCL_RET_SUBSCRIPTION_TAKE_FAILED
_GID_BYTES = 16
_MOST = 100  # messages that one poll takes
_SPARE = 4  # buffers kept for reuse: one being filled, one waiting, one in use, one spare


class _Allocator(ctypes.Structure):
    """``rcutils_allocator_t``: four functions and their state."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("allocate", "deallocate", "reallocate", "zero", "state"))


class _Bytes(ctypes.Structure):
    """``rcutils_uint8_array_t``, of which ``rcl_serialized_message_t`` is an alias."""

    _fields_ = (
        ("buffer", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("capacity", ctypes.c_size_t),
        ("allocator", _Allocator),
    )


class _Info(ctypes.Structure):
    """``rmw_message_info_t``: two times, two counts, the publisher's id (24 bytes before Iron), a flag."""

    _fields_ = (
        ("published", ctypes.c_int64),  # source_timestamp
        ("numbers", ctypes.c_uint64 * 3),
        ("implementation", ctypes.c_void_p),
        ("gid", ctypes.c_uint8 * 48),
    )


class _Rcl:
    """The functions of the ROS client library (rcl) used here; rclpy has already loaded the libraries."""

    def __init__(self) -> None:
        rcl, rcutils = ctypes.CDLL("librcl.so"), ctypes.CDLL("librcutils.so")
        self.take = rcl.rcl_take_serialized_message
        self.take.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Bytes), ctypes.c_void_p, ctypes.c_void_p]
        self.take.restype = ctypes.c_int32
        self.free = rcutils.rcutils_uint8_array_fini
        self.free.argtypes = [ctypes.POINTER(_Bytes)]
        self.free.restype = ctypes.c_int32
        self.reset_error = rcutils.rcutils_reset_error
        self.reset_error.argtypes = []
        self.reset_error.restype = None
        allocator = rcutils.rcutils_get_default_allocator
        allocator.argtypes, allocator.restype = [], _Allocator
        self.allocator = allocator()


def why_not(environment: Mapping[str, str]) -> str:
    """Return why the structs of this installation cannot be used, or ""."""
    distribution = environment.get("ROS_DISTRO", "an unknown distribution")
    if environment.get(BLOCK):
        return f"{BLOCK} is set"
    if distribution not in KNOWN_STRUCTS:
        return f"the structs of rcl in {distribution} were not tried"
    try:
        _Rcl()
    except (OSError, AttributeError) as error:
        return f"{distribution} lacks a function of rcl ({error})"
    return ""


class _Buffers:
    """Buffers for the rmw to write into, each reused once its views are gone."""

    def __init__(self, rcl: _Rcl) -> None:
        self._rcl = rcl
        self._spare: list[_Bytes] = []
        self._closed = False

    def take(self, subscription: int) -> tuple[memoryview, Origin] | None:
        """Take a message from the ``rcl_subscription_t`` at this address; return it and its origin."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = _Bytes(allocator=self._rcl.allocator)
        info = _Info()
        code = self._rcl.take(subscription, ctypes.byref(buffer), ctypes.byref(info), None)
        if code != _OK:
            self._release(buffer)
            if code == _NOTHING_THERE:
                return None
            self._rcl.reset_error()
            raise RuntimeError(f"rcl_take_serialized_message returned {code}; the frame is lost")
        taken = (ctypes.c_uint8 * buffer.length).from_address(buffer.buffer)
        weakref.finalize(taken, self._release, buffer).atexit = False
        gid = bytes(info.gid)[:_GID_BYTES]
        origin = Origin(gid if any(gid) else b"", max(0, int(info.published)))
        return memoryview(taken).cast("B").toreadonly(), origin

    def close(self) -> None:
        """Free the buffers without views; the others are freed with their last view."""
        self._closed = True
        while self._spare:
            self._rcl.free(ctypes.byref(self._spare.pop()))

    def _release(self, buffer: _Bytes) -> None:
        if self._closed or len(self._spare) >= _SPARE:
            self._rcl.free(ctypes.byref(buffer))
        else:
            self._spare.append(buffer)


class _Silent(ReentrantCallbackGroup):  # type: ignore[misc]
    """A callback group whose entities never run."""

    def can_execute(self, entity: Any) -> bool:
        return False


class _Frames(Waitable):  # type: ignore[misc]
    """Waits for a subscription's messages and takes them; a :class:`vla_ros.graph.node.RawSubscription`."""

    def __init__(
        self, node: Any, subscription: Any, callback: Callable[[memoryview, Origin], None], buffers: _Buffers
    ) -> None:
        super().__init__(node.default_callback_group)
        self._node, self._subscription = node, subscription
        self._callback = callback
        self._buffers = buffers
        self._index: int | None = None

    def __enter__(self) -> None:
        self._subscription.handle.__enter__()

    def __exit__(self, *reason: object) -> None:
        self._subscription.handle.__exit__(*reason)

    def get_num_entities(self) -> NumberOfEntities:
        return NumberOfEntities(num_subs=1)

    def add_to_wait_set(self, wait_set: Any) -> None:
        self._index = wait_set.add_subscription(self._subscription.handle)

    def is_ready(self, wait_set: Any) -> bool:
        return self._index is not None and bool(wait_set.is_ready("subscription", self._index))

    def take_data(self) -> tuple[memoryview, Origin] | None:
        with self._subscription.handle:
            return self._buffers.take(self._subscription.handle.pointer)

    async def execute(self, taken_data: tuple[memoryview, Origin] | None) -> None:
        if taken_data is not None:
            self._callback(*taken_data)

    def poll(self) -> None:
        for _ in range(_MOST):
            if (taken := self.take_data()) is None:
                return
            self._callback(*taken)

    def destroy(self) -> None:
        self._node.remove_waitable(self)
        self._node.destroy_subscription(self._subscription)
        self._buffers.close()


def subscribe_raw(
    node: Any, msg_type: Any, topic: str, callback: Callable[[Any, Origin], None], qos_profile: Any
) -> RawSubscription:
    """Call ``callback`` with a read-only view of each message's CDR bytes and its origin.

    The callback may keep the view.
    """
    buffers = _Buffers(_Rcl())
    subscription = node.create_subscription(
        msg_type, topic, callback, qos_profile, callback_group=_Silent(), raw=True
    )
    frames = _Frames(node, subscription, callback, buffers)
    node.add_waitable(frames)
    return frames
