import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from test.policies.groot.conftest import BACKBONE, DATA
from vla_ros.config import load
from vla_ros.errors import CheckpointError
from vla_ros_models.groot import GrootOptions
from vla_ros_models.groot.loading import load_network, plan_memory, read_checkpoint
from vla_ros_models.groot.processing import GrootResize


def test_the_plan_counts_the_weights_that_fp8_quantises():
    checkpoint = read_checkpoint(DATA / "two", GrootOptions(backbone=BACKBONE))
    resize, held, planned = GrootResize((96, 96), (86, 86), 96, 0.9), [], []
    for kind in ("none", "fp8"):
        layers = load_network(checkpoint, dtype="bfloat16", quantization=kind).text.layers
        held.append(sum(matrix.data.nbytes for layer in layers for matrix in layer.matrices))
        plan = plan_memory(checkpoint.architecture, "bfloat16", kind, "cpu", cameras=2, resize=resize)
        planned.append(plan.weights)
    assert planned[0] - planned[1] == held[0] - held[1] > 0


PROCESSOR = ("processor_config.json", "statistics.json", "embodiment_id.json")


@pytest.mark.parametrize("kept", [False, True])
def test_the_processors_files_may_lie_in_a_folder_of_their_own(kept: bool, tmp_path: Path) -> None:
    """As NVIDIA's training saves them; files beside the weights count first."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / "joints", folder)
    folder.chmod(0o755)
    (folder / "processor").mkdir()
    for name in PROCESSOR:
        shutil.copy(folder / name, folder / "processor" / name)
        if not kept:
            (folder / name).unlink()
    if kept:
        (folder / "processor" / PROCESSOR[0]).write_text("{ half")
    options = GrootOptions(backbone=BACKBONE)
    found, usual = (read_checkpoint(one, options) for one in (folder, DATA / "joints"))
    assert (found.tag, found.embodiment) == (usual.tag, usual.embodiment)
    assert [part.name for part in found.processing.parts] == [part.name for part in usual.processing.parts]


@pytest.mark.parametrize(
    ("config", "version", "words"),
    [
        ({"model_type": "gr00t_n1_5", "architectures": ["GR00T_N1_5"]}, "N1.5", "branch n1.5-release"),
        ({"architectures": ["GR00T_N1_5"], "backbone_cfg": {"eagle_path": "x"}}, "N1.5", "lerobot 0.5.1"),
        ({"model_type": "Gr00tN1d6"}, "N1.6", "branch n1.6-release"),
        (
            {"type": "groot", "input_features": {}, "tokenizer_assets_repo": "lerobot/eagle2"},
            "N1.5",
            "policy.python",
        ),
        (
            {"type": "groot", "input_features": {}, "base_model_path": "nvidia/GR00T-N1.5-3B"},
            "N1.5",
            "lerobot 0.5.1",
        ),
    ],
)
def test_an_older_model_is_named_with_what_runs_it(
    config: dict[str, Any], version: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load((), [f"policy.checkpoint:={tmp_path}"]).policy.name == "groot"
    with pytest.raises(CheckpointError, match=f"GR00T {version}, another network; this package runs N1.7.*{words}"):
        read_checkpoint(tmp_path, GrootOptions())
