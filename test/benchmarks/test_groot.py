import json

import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from benchmarks.models.__main__ import main
from benchmarks.models.groot import published
from test.benchmarks.test_pi import KEYS


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_every_key_is_there(tmp_path, quantization, capsys):
    command = ["groot-n1.7", "--images", "2", "--horizon", "16", "--quantization", quantization, "--device", "cpu"]
    assert main([*command, "--steps", "1", "--json", str(tmp_path / "groot.json")]) == 0
    found = json.loads((tmp_path / "groot.json").read_text())
    assert found.keys() >= KEYS
    assert found["stages_ms"].keys() >= {"receive", "upload", "preprocess", "vision", "prefill", "flow", "download"}
    assert found["baseline_ms"] > 0
    assert found["baseline_difference"] < 1e-4  # the same passes, without graphs
    assert found["sequence"] == 2 * 64 + 22  # 256x256 pixels, patches of 16, four of them for one token
    assert "horizon 16, 4 flow steps" in capsys.readouterr().out


def test_the_published_sizes():
    sizes = published(tiny=False, horizon=40)
    assert (sizes.vision.blocks.layers, sizes.text.layers, sizes.head.layers) == (24, 16, 32)
    assert (sizes.text.hidden_size, sizes.head.hidden_size, sizes.horizon) == (2048, 1536, 40)
