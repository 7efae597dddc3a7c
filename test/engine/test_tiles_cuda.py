"""Tiles of another GPU, and tiles that were measured, on a GPU: the same tokens and chunks."""

import pytest
import torch

from vla_ros_models.engine import tile_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]


@pytest.mark.parametrize("name", ["openvla", "openvla-int4", "pi05"])
def test_the_tiles_of_an_rtx_4090_give_the_same_answers(name):
    """Two layers of the published sizes, whole: start-up checks, graphs, steps."""
    from benchmarks.tiles import MODELS, simulated

    model, answers = MODELS[name](2), []
    for gpu in ("", "8.9"):
        with simulated(gpu):
            engine = model.engine()
            answers.append(model.answers(engine)[0])
            engine.close()
    good, text = model.compare(answers[1], answers[0])
    assert good, text


def test_measured_tiles_are_stored_and_used(tmp_path, monkeypatch):
    """A search of few candidates, one of which cannot run; what was found is in force afterwards."""
    from benchmarks.tiles import CUDA, MODELS
    from vla_ros_models.engine import tune
    from vla_ros_models.engine.device_ops import measured_on
    from vla_ros_models.engine.tile import Tile
    from vla_ros_models.tune import tune_engine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "shapes", lambda work, tile: [Tile(16, 64), Tile(64, 128, warps=16)])
    monkeypatch.setattr(tune, "depths", lambda work, tile: [])
    monkeypatch.setattr(tune, "LEAST_GAIN", 10.0)  # whatever runs is taken
    engine = MODELS["pi05"](2).engine()
    tile_store.tiles_of.cache_clear()
    found = tune_engine(engine)
    engine.close()
    name = torch.cuda.get_device_name(CUDA)
    assert found.best
    assert tile_store.read_tiles(name) == found.best
    used = measured_on(CUDA)
    assert [used(work) for work in found.works("flow").values()] == [
        found.tile(w) for w in found.works("flow").values()
    ]
    tile_store.tiles_of.cache_clear()
