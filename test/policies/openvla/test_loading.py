import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.checkpoints.tiny import random_weights
from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import INDEX, SINGLE, from_files, read_manifest, stored_names
from vla_ros_models.openvla.loading import build_empty, check_weights
from vla_ros_models.weights import empty, fill

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
CPU = torch.device("cpu")


def load(folder, architecture):
    model, manifest = build_empty(architecture), read_manifest(folder)
    check_weights(model, manifest, folder)
    fill(model, from_files(manifest), CPU, torch.float32)
    return model


def edit(folder, change):
    """Rewrite the second shard after ``change`` had its tensors; the index follows."""
    tensors = load_file(folder / SECOND)
    change(tensors)
    save_file(tensors, folder / SECOND)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file == FIRST}
    index["weight_map"].update(dict.fromkeys(tensors, SECOND))
    (folder / INDEX).write_text(json.dumps(index))


def test_a_network_without_weights_needs_no_compiler(monkeypatch):
    """To draw random numbers without memory, torch imports its compiler, which takes seconds."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    assert empty(lambda: torch.nn.Embedding(5, 3)).weight.is_meta


def test_loaded_weights_equal_the_written_ones(tiny, small):
    expected = random_weights(small)
    model = load(tiny, small)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {CPU}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    before = model.projector.fc1.weight.clone()  # weights do not change with the files
    for file in tiny.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.seek(-4000, 2)
            stream.write(bytes(4000))
    torch.testing.assert_close(model.projector.fc1.weight, before, rtol=0, atol=0)


def test_progress_ends_at_one(tiny, small):
    seen = []
    model = build_empty(small)
    fill(model, from_files(read_manifest(tiny)), CPU, torch.float32, lambda share, what: seen.append((share, what)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert {what for _, what in seen} == {f"loading {name}" for name, _ in model.named_parameters()}


def test_a_single_file_needs_no_index(tiny, small):
    save_file({**load_file(tiny / FIRST), **load_file(tiny / SECOND)}, tiny / SINGLE)
    for name in (FIRST, SECOND, INDEX):
        (tiny / name).unlink()
    load(tiny, small)


def test_unused_stored_weights_are_accepted(tiny, small):
    def change(tensors):
        for tower in ("featurizer", "fused_featurizer"):
            tensors[f"vision_backbone.{tower}.blocks.2.norm1.weight"] = torch.zeros(32)
            tensors[f"vision_backbone.{tower}.norm.weight"] = torch.zeros(32)
        tensors["vision_backbone.fused_featurizer.attn_pool.q.weight"] = torch.zeros(32, 32)
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit(tiny, change)
    load(tiny, small)


def _put(key, value):
    return lambda tensors: tensors.update({key: value})


FC1 = "vision_backbone.fused_featurizer.blocks.1.mlp.fc1.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(FC1), rf"1 missing: {FC1}"),
        (_put("vision_backbone.featurizer.blocks.3.norm1.weight", torch.zeros(32)), r"1 unexpected: .*blocks\.3"),
        (_put("action_head.weight", torch.zeros(3)), r"1 unexpected: action_head\.weight"),
        (_put(FC1, torch.zeros(4, 32)), rf"of the wrong shape: {FC1} in {SECOND}: \[4, 32\], expected \[128, 32\]"),
        (_put(FC1, torch.zeros(128, 32, dtype=torch.int8)), r"not of a type.*I8"),
    ],
)
def test_weights_of_wrong_name_shape_or_type_are_refused(tiny, small, change, words):
    edit(tiny, change)
    with pytest.raises(CheckpointError, match=words):
        load(tiny, small)


def cut(keep):
    return lambda file: file.write_bytes(file.read_bytes()[:keep])


def spoil(file):
    content = file.read_bytes()
    file.write_bytes(content[:40] + b"\xff" * 40 + content[80:])


def point(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def index(content):
    return lambda file: file.write_text(content)


def promise(file):
    found = json.loads(file.read_text())
    found["weight_map"]["projector.fc9.weight"] = FIRST
    file.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        *((SECOND, cut(keep), rf"{SECOND}: damaged.*download it again") for keep in (0, 5, 100, -1000)),
        (SECOND, spoil, SECOND),
        (FIRST, point, "git lfs pull"),
        (FIRST, Path.unlink, rf"missing shards \['{FIRST}'\] with \d+ tensors"),
        (INDEX, promise, rf"{FIRST}: 1 of the tensors in the index missing: projector\.fc9"),
        *((INDEX, index(content), r"index\.json") for content in ("{}", '{"weight_map": {}}', "[1]", "{")),
        (INDEX, index('{"weight_map": {"a": "../other/model.safetensors"}}'), "same folder"),
    ],
)
def test_damaged_and_missing_files_are_named(tiny, file, damage, words):
    damage(tiny / file)
    with pytest.raises(CheckpointError, match=words):
        read_manifest(tiny)


def test_pickles_are_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*pickles.*safetensors"):
        read_manifest(tmp_path)


def test_a_single_file_counts_where_shards_are_left(tiny, caplog):
    """A model that was saved as shards and later as one file: transformers and LeRobot read the file."""
    folder, names = tiny, sorted(read_manifest(tiny))
    new = {name: torch.full((2,), 0.25) for name in names}
    save_file(new, folder / "model.safetensors")
    manifest = read_manifest(folder)
    assert {one.file.name for one in manifest.values()} == {"model.safetensors"}
    assert torch.equal(dict(from_files(manifest)([names[0]]))[names[0]], new[names[0]])
    assert f"model.safetensors is read, as transformers and LeRobot do; {FIRST}, {SECOND}, {INDEX}" in caplog.text
    assert stored_names(folder) == names
    (folder / FIRST).unlink()  # shards that are not read may be missing
    assert set(read_manifest(folder)) == set(names)
