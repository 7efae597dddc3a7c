import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from vla_ros.errors import CheckpointError
from vla_ros_models.pi.processing import find_tokenizer, load_tokenizer

from .conftest import DATA


def test_the_tokenizer_is_found_in_folder_or_file(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer"):
        find_tokenizer(tmp_path)
    assert find_tokenizer(tmp_path, str(DATA)) == DATA / "tokenizer.json"
    assert find_tokenizer(tmp_path, str(DATA / "tokenizer.model")) == DATA / "tokenizer.model"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_tokenizer_of_another_vocabulary_is_refused(name, tmp_path):
    tokenizer = load_tokenizer(DATA / name, 900)
    assert tokenizer.encode("<eos>fold") != [1, *tokenizer.encode("fold")], "control tokens in a text are text"
    with pytest.raises(CheckpointError, match=r"900 pieces .* trained with 257152 pieces"):
        load_tokenizer(DATA / name, 257152)
    damaged = tmp_path / name
    damaged.write_bytes((DATA / name).read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="not a"):
        load_tokenizer(damaged, 900)


def test_a_tokenizer_with_other_control_tokens_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    text = (DATA / "tokenizer.json").read_text()
    path.write_text(text.replace("<bos>", "<s>"))
    with pytest.raises(CheckpointError, match="'<bos>': None"):
        load_tokenizer(path, 900)


def test_a_tokenizer_whose_line_break_is_no_piece_is_refused(tmp_path):
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<bos>": 2, "go": 3}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"a line break is \[\], expected one piece"):
        load_tokenizer(tmp_path / "tokenizer.json", 4)


def test_an_image_token_behind_the_vocabulary_does_not_count(tmp_path):
    content = json.loads((DATA / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 900, "content": "<image>"})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert load_tokenizer(path, 900).encode("fold the towel") == load_tokenizer(DATA / path.name, 900).encode(
        "fold the towel"
    )


def test_both_tokenizers_give_the_same_ids():
    one, other = (load_tokenizer(DATA / f"tokenizer.{end}", 900) for end in ("json", "model"))
    for text in ("pick up the cup", "Task: go, State: -1 128 255;\nAction: ", "\n", " über  zwei"):
        assert one.encode(text) == other.encode(text)
