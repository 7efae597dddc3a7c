import os
import subprocess
import sys

import pytest

from vla_ros.errors import MissingDependencyError
from vla_ros_lab.sim import render

PROGRAM = """
from vla_ros.errors import MissingDependencyError
from vla_ros_lab.sim.world import TableTop
try:
    TableTop().render()
except MissingDependencyError as error:
    print(error)
"""


def run(**variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_egl_without_a_driver_names_the_packages(tmp_path):
    """GLVND searches an empty folder for drivers, as on a machine without Mesa."""
    said = run(__EGL_VENDOR_LIBRARY_DIRS=str(tmp_path), MUJOCO_GL="egl")
    assert "sudo apt install libegl1 libgl1-mesa-dri" in said
    assert "EGL" in said


def test_without_any_library_the_packages_are_named(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(render.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(MissingDependencyError, match="libegl1 libgl1-mesa-dri"):
        render.choose_backend()


def test_osmesa_is_used_without_egl(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(render.ctypes.util, "find_library", lambda name: "x" if name == "OSMesa" else None)
    assert render.choose_backend() == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert render.choose_backend() == "egl"


def test_an_image_larger_than_the_models_buffer_shows_the_same_scene():
    """Its rows and columns beyond 640 were what happened to be in memory."""
    from vla_ros_lab.sim.world import TableTop, WorldOptions

    images = []
    for side in (240, 720):
        world = TableTop(WorldOptions(side, side))
        world.reset(3)
        images.append(world.render().reshape(240, side // 240, 240, side // 240, 3).mean((1, 3)))
        world.close()
    difference = abs(images[0] - images[1]).reshape(6, 40, 6, 40, 3).mean((1, 3, 4))
    assert difference.max() < 6, "each sixth of the image, of 255"


def test_a_world_may_be_closed_twice():
    from vla_ros_lab.sim.world import TableTop

    world = TableTop()
    world.render()
    world.close()
    world.close()
    assert world.render().any(), "a closed world renders again"
    world.close()
