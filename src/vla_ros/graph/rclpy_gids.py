"""By which id discovery knows a publisher of rclpy's: rmw knows, and rclpy does not say.

``rmw_get_gid_for_publisher`` (rmw/rmw.h) is called through ctypes on the ``rcl_publisher_t`` that rclpy points to.
"""

from __future__ import annotations

import ctypes
from typing import Any

from vla_ros.errors import VlaRosError


class _Gid(ctypes.Structure):
    """``rmw_gid_t``; 24 bytes before Iron, 16 since."""

    _fields_ = (("implementation", ctypes.c_char_p), ("data", ctypes.c_uint8 * 24))


def publisher_gid(publisher: Any) -> bytes:
    """The ``endpoint_gid`` of an rclpy publisher (24 bytes, zeros behind it).

    Raises:
        VlaRosError: The middleware does not say.
    """
    handle_of = ctypes.CDLL("librcl.so").rcl_publisher_get_rmw_handle
    handle_of.argtypes, handle_of.restype = [ctypes.c_void_p], ctypes.c_void_p
    gid_of = ctypes.CDLL("librmw_implementation.so").rmw_get_gid_for_publisher
    gid_of.argtypes, gid_of.restype = [ctypes.c_void_p, ctypes.POINTER(_Gid)], ctypes.c_int32
    gid = _Gid()
    with publisher.handle:
        code = gid_of(handle_of(publisher.handle.pointer), ctypes.byref(gid))
    if code:
        raise VlaRosError(
            f"the middleware does not know its own publisher of {publisher.topic_name} (error {code})"
        )
    return bytes(gid.data)
