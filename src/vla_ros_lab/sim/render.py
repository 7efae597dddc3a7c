"""Off-screen rendering with MuJoCo and EGL, or OSMesa if EGL is missing."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
from typing import Any

import numpy as np

from vla_ros.errors import MissingDependencyError
from vla_ros.types import Float32Array, UInt8Array

_PACKAGES = "libegl1 libgl1-mesa-dri"
"""Debian and Ubuntu packages for EGL on a CPU."""


def choose_backend() -> str:
    """Return ``egl`` or ``osmesa``: the value of ``MUJOCO_GL``, else the first whose library is installed."""
    wanted = os.environ.get("MUJOCO_GL", "").strip().lower()
    if wanted in ("egl", "osmesa"):
        return wanted
    for library in ("EGL", "OSMesa"):
        if ctypes.util.find_library(library):
            return library.lower()
    found = "found neither libEGL nor libOSMesa, expected one for off-screen rendering"
    advice = f"On Debian and Ubuntu: sudo apt install {_PACKAGES}"
    raise MissingDependencyError(f"the simulation's camera: {found}. {advice}")


def _make_context(width: int, height: int) -> Any:
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401 - importing it (as torch does) crashes once Mesa has loaded its LLVM
    backend = choose_backend()
    try:
        if backend == "egl":
            from mujoco.egl import GLContext
        else:
            from mujoco.osmesa import GLContext
        context = GLContext(width, height)
        context.make_current()
    except Exception as error:  # PyOpenGL raises many kinds: ImportError, AttributeError...
        package = _PACKAGES if backend == "egl" else "libosmesa6"
        found = f"no {backend.upper()} context ({type(error).__name__}: {error}), expected off-screen OpenGL"
        advice = f"On Debian and Ubuntu: sudo apt install {package}. MUJOCO_GL=egl or osmesa selects the backend"
        raise MissingDependencyError(f"the simulation's camera: {found}. {advice}") from error
    return context


class Renderer:
    """Renders a ``mujoco.MjModel`` at ``width`` x ``height`` pixels, on the thread that created it."""

    def __init__(self, model: Any, width: int, height: int) -> None:
        self._context: Any = _make_context(width, height)
        import mujoco

        self._mujoco = mujoco
        self._model = model
        self._scene = mujoco.MjvScene(model, maxgeom=200)
        # Shadows and reflections cost ten times the rest on a CPU, and the policy needs neither.
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = 0
        self._option = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        # What lies outside the buffer would be read as it is in memory.
        area = model.vis.global_
        area.offwidth, area.offheight = max(area.offwidth, width), max(area.offheight, height)
        self._target = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._target.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR  # float32 is finest near 0
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._target)
        self._window = mujoco.MjrRect(0, 0, width, height)

    def render(self, data: Any, camera: str, depth: Float32Array | None = None) -> UInt8Array:
        """Return the upright image uint8 [H, W, 3] RGB of ``data`` (``mujoco.MjData``) from the named camera.

        ``depth``, float32 [H, W], is filled with the distance of each pixel along the optical axis, metres.
        """
        mujoco = self._mujoco
        self._context.make_current()
        self._camera.fixedcamid = self._model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._option, None, self._camera, everything, self._scene)
        mujoco.mjr_render(self._window, self._scene, self._target)
        pixels = np.empty((self._window.height, self._window.width, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, depth, self._window, self._target)
        if depth is not None:  # 1 at the near plane, 0 at the far plane
            extent, clip = self._model.stat.extent, self._model.vis.map
            near, far = clip.znear * extent, clip.zfar * extent
            depth[:] = near * far / (near + depth[::-1] * (far - near))
        return np.ascontiguousarray(pixels[::-1])  # OpenGL stores the bottom row first

    def close(self) -> None:
        """Free the OpenGL context; may be called twice."""
        if self._context is not None:
            self._context.make_current()
            self._target.free()
            self._context.free()
            self._context = None
