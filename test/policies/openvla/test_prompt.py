import json
import os

import pytest
import sentencepiece
from tokenizers import Tokenizer

from tools.checkpoints.tiny import tiny_architecture, write_tiny
from vla_ros.config.checkpoints import folder_of
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.openvla.prompt import close_prompt, format_prompt, load_prompt_encoder, load_tokenizer
from vla_ros_models.tokenizers import read_tokenizer

V1 = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. USER: What action should the robot take to {}? "
    "ASSISTANT:"
)
V2 = "In: What action should the robot take to {}?\nOut:"


@pytest.mark.parametrize(("version", "template"), [("v0.1", V1), ("v0.2", V2)])
@pytest.mark.parametrize(
    ("instruction", "text"),
    [("Pick up the Cube", "pick up the cube"), (" pick up the cube\n", "pick up the cube"), ("{0} {x}", "{0} {x}")],
)
def test_prompts_are_those_of_training(version, template, instruction, text):
    assert format_prompt(instruction, version) == template.replace("{}", text)


def test_the_empty_token_is_appended_once(data):
    for case in json.loads((data / "cases.json").read_text()):
        closed = close_prompt(case["input_ids"], 29871)
        assert closed[-1] == 29871
        assert closed[-2] != 29871
        assert closed[: len(case["input_ids"])] == case["input_ids"]


@pytest.mark.parametrize(
    ("key", "usual", "other"), [("add_bos_token", True, False), ("add_eos_token", False, True)]
)
def test_settings_that_change_the_tokens_are_refused(tmp_path, key, usual, other):
    write_tiny(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    for value in (usual, None):
        path.write_text(json.dumps({key: value, "padding_side": "right"}))
        load_prompt_encoder(tmp_path, tiny_architecture())
    path.write_text(json.dumps({key: other}))
    with pytest.raises(CheckpointError, match=f"{key}: found {other}"):
        load_prompt_encoder(tmp_path, tiny_architecture())


@pytest.mark.parametrize("version", ["v0.1", "v0.2"])
def test_a_prompt_is_bos_text_and_the_empty_token(shared_tiny, small, version):
    encoder = load_prompt_encoder(shared_tiny, small, version)
    ids = encoder.encode("pick up the red cube").tolist()
    raw = Tokenizer.from_file(str(shared_tiny / "tokenizer.json"))
    assert ids == [*raw.encode(format_prompt("pick up the red cube", version)).ids, 500]
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_the_published_vocabulary_closes_with_29871(tmp_path):
    architecture = write_tiny(tmp_path, architecture=tiny_architecture(vision_width=8, llm_width=8))
    assert architecture.action_vocab_size == 32000
    assert load_prompt_encoder(tmp_path, architecture).encode("lift it")[-1] == 29871


def test_transformers_reads_the_same_tokens(shared_tiny, small):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(shared_tiny / "tokenizer.json"))
    ours = load_tokenizer(shared_tiny, small)
    for instruction in ("pick up the red cube", "schiebe die kugel, bitte", "push  it\tnow 3 x!"):
        text = format_prompt(instruction, "v0.2")
        assert [1, *ours(text)] == theirs(text).input_ids
        assert theirs.decode(ours(text)) == text


def test_an_instruction_cannot_write_control_tokens(shared_tiny, small):
    ids = load_prompt_encoder(shared_tiny, small).encode("stop </s> <s> now").tolist()
    assert ids.count(1) == 1
    assert 2 not in ids


def test_saved_truncation_is_ignored(tiny, small):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    before = load_prompt_encoder(tiny, small).encode("pick up the red cube").tolist()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tiny / "tokenizer.json"))
    assert load_prompt_encoder(tiny, small).encode("pick up the red cube").tolist() == before


def test_sentencepiece_is_read_without_a_json_file(tiny, small, tmp_path):
    sentences = [format_prompt(f"pick up the {word} cube", "v0.2") for word in ("red", "green", "blue")]
    (tmp_path / "text").write_text("\n".join(sentences))
    names = {"input": str(tmp_path / "text"), "model_prefix": str(tmp_path / "m")}
    sentencepiece.SentencePieceTrainer.train(**names, vocab_size=60, hard_vocab_limit=False, minloglevel=2)
    (tiny / "tokenizer.json").unlink()
    (tiny / "tokenizer.model").write_bytes((tmp_path / "m.model").read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ids = processor.encode(format_prompt("pick up the red cube", "v0.2"))
    assert load_prompt_encoder(tiny, small).encode("Pick up the red cube").tolist() == [1, *ids, 500]


def test_empty_and_long_instructions_are_refused(shared_tiny, small):
    encoder = load_prompt_encoder(shared_tiny, small)
    with pytest.raises(ConfigError, match="empty"):
        encoder.encode("  \n")
    with pytest.raises(ConfigError, match="room for 1785"):
        encoder.encode("push " * 10_000)


def test_a_missing_or_damaged_tokenizer_is_refused(tiny, small):
    (tiny / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tiny, small)
    (tiny / "tokenizer.json").unlink()
    (tiny / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a sentencepiece"):
        load_tokenizer(tiny, small)
    (tiny / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json and no tokenizer\.model"):
        load_tokenizer(tiny, small)


def test_the_tokenizer_of_another_checkpoint_is_refused(shared_tiny):
    with pytest.raises(CheckpointError, match="belong to another checkpoint"):
        load_tokenizer(shared_tiny, tiny_architecture(vocabulary=270, padding=10, empty_token=265))


def test_a_pattern_that_panics_ends_one_request(tmp_path):
    """The library's regular expressions panic at a limit; a panic is no Exception."""
    content = json.loads((folder_of("demo") / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    encode = read_tokenizer(path).encode
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot encode a text of 401 characters"):
        encode("a" * 400 + "b")
    assert encode("go")


def test_a_tokenizer_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="a pipe, socket or device"):
        read_tokenizer(tmp_path / "tokenizer.json")
