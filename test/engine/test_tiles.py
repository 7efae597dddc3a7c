"""The choice of tiles for every GPU, and the file of tiles that were measured on one."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.models.pi import TINY
from vla_ros.errors import ConfigError
from vla_ros_models import house
from vla_ros_models.engine import tile_store
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.passes import flow_passes
from vla_ros_models.engine.tile import Tile
from vla_ros_models.engine.tile_configs import (
    FLOW_SIZES,
    GPUS,
    SHORT,
    SIMULATE,
    TUNED_FOR,
    Work,
    choose_tile,
    gpu_of,
)
from vla_ros_models.pi.architecture import PUBLISHED
from vla_ros_models.pi.network import PiNetwork, make_flow

GPU = "NVIDIA GeForce RTX 4090"
WORKS = (
    Work("decode", 4096, 12288, "qkv", "dense", 1),
    Work("decode", 11008, 4096, "down_proj", "int4", 32, 0.53),
    Work("flow", 2048, 1024, "o_proj", "dense", 64),
    Work("gemm", 4096, 12288, "", "int8", 288, 1.0),
    Work("attend_prefix", 256),
    Work("flow", 960, 768, "o_proj", "dense", 64),
    Work("attend_flow", 256, rows=64),
    Work("attend_flow", 64, SHORT, rows=64),
    Work("attend_both_ways", 128),
)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tile_store, "_driver", lambda: "580.65.06")
    tile_store.tiles_of.cache_clear()
    yield tmp_path / "vla_ros" / "tiles"
    tile_store.tiles_of.cache_clear()


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_a_tile_depends_on_the_gpu_and_measured_ones_win(work):
    if work.kernel != "gemm":  # whose tiles depend on the number of multiprocessors, too
        assert choose_tile(GPUS["8.6"], work) == choose_tile(GPUS["8.9"], work)
    measured = replace(choose_tile(GPUS["8.9"], work), warps=1, stages=2)
    assert choose_tile(GPUS["8.9"], work, lambda one: {work.key: measured}.get(one.key)) == measured


@pytest.mark.parametrize("key", FLOW_SIZES)
def test_tiles_of_a_models_sizes_fit_unreduced(key):
    kernel, *role, _, size = key.split()
    rows, outputs, inputs = map(int, size.split("x"))
    work = Work(kernel, inputs, outputs, *role, rows=rows)
    assert work.key == key
    assert choose_tile(TUNED_FOR, work) == FLOW_SIZES[key]


def test_another_gpu_is_simulated_and_an_unknown_one_refused(monkeypatch):
    gpu_of.cache_clear()
    monkeypatch.setenv(SIMULATE, "8.9")
    assert gpu_of(torch.device("meta")) == GPUS["8.9"]
    gpu_of.cache_clear()
    monkeypatch.setenv(SIMULATE, "7.5")
    with pytest.raises(ConfigError, match=r"'7\.5', expected one of 8\.0, 8\.6"):
        gpu_of(torch.device("meta"))
    gpu_of.cache_clear()


def test_measured_tiles_are_read_back_and_added_to(store):
    assert tile_store.read_tiles(GPU) == {}
    first, second = Tile(32, 128, 2, 6), Tile(64, max_registers=128, tail_m=0)
    path = tile_store.write_tiles(GPU, {"decode qkv": first})
    assert path == tile_store.write_tiles(GPU, {"gemm int8": second})
    assert path.parent == store
    assert tile_store.read_tiles(GPU) == {"decode qkv": first, "gemm int8": second}
    assert tile_store.tiles_of(GPU) == tile_store.read_tiles(GPU)
    assert tile_store.read_tiles("NVIDIA A100") == {}
    assert house._tiles(GPU).found.startswith("2 measured on NVIDIA GeForce RTX 4090")


def change(content, name, value):
    return {**content, name: value}


def change_tile(content, **fields):
    return {**content, "tiles": {"decode qkv": {**asdict(Tile()), **fields}}}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: change(content, "driver", "535.1"), "its driver is '535.1', expected '580.65.06'"),
        (lambda content: change(content, "gpu", "NVIDIA H200"), "its gpu is 'NVIDIA H200'"),
        (lambda content: change(content, "triton", "2.0"), "its triton is '2.0'"),
        (lambda content: change(content, "format", None), "its format is None"),
        (lambda content: change(content, "tiles", [1]), "it holds no tiles"),
        (lambda content: [content], "it holds no tiles"),
        (lambda content: change_tile(content, warps=3), "warps of the tile of 'decode qkv' is 3"),
        (lambda content: change_tile(content, warps=True), "is True"),
        (lambda content: change_tile(content, stages=0), "stages of the tile of 'decode qkv' is 0"),
        (lambda content: change_tile(content, block_n=2**20), "expected at most 512"),
        (lambda content: change_tile(content, block_n="__import__('os')"), 'is "__import__'),
        (lambda content: change_tile(content, more=1), "the tile of 'decode qkv' is"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_and_replaced(store, caplog, damage, why):
    path = tile_store.write_tiles(GPU, {"decode qkv": Tile()})
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(ConfigError) as refused:
        tile_store.read_tiles(GPU)
    assert str(path) in str(refused.value)
    assert why in str(refused.value)
    assert tile_store.tiles_of(GPU) == {}
    assert "is refused" in caplog.text
    found = house._tiles(GPU)
    assert (found.level, found.fix) == (house.WRONG, "vla-ros tune --checkpoint DIR")
    tile_store.write_tiles(GPU, {"decode qkv": Tile(32)})
    assert tile_store.read_tiles(GPU) == {"decode qkv": Tile(32)}


def test_a_file_that_is_no_json_is_refused(store):
    path = tile_store.write_tiles(GPU, {})
    path.write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ConfigError, match="is refused"):
        tile_store.read_tiles(GPU)


def test_the_passes_that_are_tuned_repeat_themselves(tiny):
    """Each candidate's result is compared with that of torch's operations over the same noise."""
    engine = tiny.engine()
    first, again = ({name: run() for name, run in engine.passes(Ops(), 2).items()}, engine.passes(Ops(), 2))
    assert list(first) == ["decode", "prompt"]
    for name, expected in first.items():
        for _ in range(2):  # a captured pass runs many times over its own cache
            torch.testing.assert_close(again[name](), expected, rtol=0, atol=0)
    flow = make_flow(PiNetwork(replace(PUBLISHED["pi05"], **TINY, horizon=4)).eval().requires_grad_(False), steps=3)
    passes = flow_passes(flow, Ops(), 8, 1)
    assert list(passes) == ["prefix", "flow"]
    for run in passes.values():
        torch.testing.assert_close(run(), run(), rtol=0, atol=0)
        assert run().isfinite().all()
