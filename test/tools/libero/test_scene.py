"""LIBERO's scenes for geometric tokens, in LIBERO's own Python: ``LIBERO_PYTHON=PY pytest``."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tools.libero.expert import BOWL, PLATE
from tools.libero.scene import _free

ROOT = Path(__file__).parents[3]

# Casts MuJoCo's rays while an image is rendered, as the hand moves, through pixels of the image as sent.
RAYS = """
import math
import mujoco
import numpy as np
from tools.libero.scene import CAMERAS, SIZE, Changes, Scene

scene = Scene(2, 7, True, Changes(displace=0.08, spread=0.5, camera_turn=22.5))
scene.begin(3)
scene.settle()
model, data, group = scene.sim.model._model, scene.sim.data._data, np.array([0, 1, 0, 0, 0, 0], np.uint8)
base, hits, render = data.body("robot0_base"), {}, scene.sim.render

def cast(camera_name, **how):
    camera, found = data.camera(camera_name), np.full((SIZE, SIZE, 3), np.nan)
    slope = math.tan(math.radians(model.camera(camera_name).fovy[0]) / 2) / SIZE
    for row in range(0, SIZE, 4):
        for column in range(0, SIZE, 4):
            way = np.array([SIZE - 2 * column - 0.5, SIZE - 2 * row - 0.5, -1 / slope])
            way = camera.xmat.reshape(3, 3) @ (way / np.linalg.norm(way))
            far = mujoco.mj_ray(model, data, camera.xpos, way, group, 1, -1, np.zeros(1, np.int32))
            found[row, column] = base.xmat.reshape(3, 3).T @ (camera.xpos + far * way - base.xpos)
    hits[camera_name] = found
    return render(camera_name=camera_name, **how)

scene.sim.render = cast
for _ in range(3):
    obs, *_ = scene.env.step([0.5, 0.2, -0.6, 0.0, 0.0, 0.3, -1.0])
for camera in CAMERAS:
    missed = np.linalg.norm(scene.points(obs, camera) - hits[camera], axis=-1)[::4, ::4]
    print("RAYS", camera, np.median(missed), np.mean(missed < 0.005))
low, high = scene.region()
bowl = scene.sim.data.body("akita_black_bowl_1_main").xpos[:2]
print("OUTSIDE", max([*(low - bowl), *(bowl - high)]))
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif("LIBERO_PYTHON" not in os.environ, reason="LIBERO_PYTHON names no Python with LIBERO")
def test_points_are_where_mujocos_rays_end_and_a_displaced_bowl_stays(tmp_path: Path) -> None:
    """Off the edges of things: there, a ray and a renderer may disagree by a pixel."""
    (tmp_path / "rays.py").write_text(RAYS)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [os.environ["LIBERO_PYTHON"], tmp_path / "rays.py"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    said = [line.split() for line in run.stdout.splitlines() if line.startswith(("RAYS", "OUTSIDE"))]
    assert [words[0] for words in said] == ["RAYS", "RAYS", "OUTSIDE"]
    for _, camera, median, share in said[:2]:
        assert float(median) < 0.002, camera
        assert float(share) > 0.95, camera
    assert float(said[2][1]) == pytest.approx(0.08, abs=0.01)


def test_objects_are_apart_and_the_bowl_is_within_reach() -> None:
    at = {BOWL: np.array([0.0, 0.0]), PLATE: np.array([0.0, 0.2])}
    assert _free(at)
    assert not _free({**at, PLATE: np.array([0.0, 0.1])})
    assert not _free({**at, BOWL: np.array([0.18, 0.0])})
    assert not _free({**at, BOWL: np.array([0.0, -0.1])})
