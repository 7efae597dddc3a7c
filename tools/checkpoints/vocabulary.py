"""Writes a whole-word tokenizer in Llama-2's layout, for small checkpoints with their own vocabulary.

Ids 0 to 2 are ``<unk>``, ``<s>`` and ``</s>``, ids 3 to 258 are the bytes, and the words follow. One further id is
a single space, which closes every prompt, as 29871 does in Llama-2. Words outside the vocabulary are spelled in
bytes, so any text can be encoded.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from vla_ros_models.openvla.architecture import LLAMA2_EMPTY_TOKEN

SPACE = "\u2581"
"""The mark that stands for a space before a word."""

FIRST_WORD = 259
"""Id of the first word: after three special tokens and 256 bytes."""

PROMPT_WORDS = (
    *("In", ":", "What", "action", "should", "the", "robot", "take", "to", "?", "Out"),
    *("A", "chat", "between", "a", "curious", "user", "and", "an", "artificial", "intelligence", "assistant", "."),
    *("The", "gives", "helpful", ",", "detailed", "polite", "answers", "'", "s", "questions", "USER", "ASSISTANT"),
)
"""The words of the prompt templates."""

TABLE_WORDS = (
    *("pick", "up", "push", "place", "put", "move", "left", "right", "on", "in", "into", "of", "from", "next"),
    *("red", "green", "blue", "yellow", "orange", "purple", "black", "white", "cube", "cylinder", "ball", "block"),
    *("bowl", "plate", "table", "drawer", "open", "close", "lift", "it", "down", "object", "then", "away"),
)
"""Words of table-top instructions."""


def word_ids(words: Iterable[str], empty_token: int = LLAMA2_EMPTY_TOKEN) -> dict[str, int]:
    """Return the id of every piece: each word with and without the space mark before it.

    ``empty_token``, at least :data:`FIRST_WORD`, is the id of the lone space mark; the words' ids skip it.
    """
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2}
    ids.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    if empty_token < FIRST_WORD:
        raise ValueError(f"empty_token {empty_token} is a special token or a byte; it must be {FIRST_WORD} or more")
    following = FIRST_WORD
    for word in dict.fromkeys(words):
        for piece in (SPACE + word, word):
            following += following == empty_token
            ids[piece] = following
            following += 1
    ids[SPACE] = empty_token
    return ids


def write_tokenizer(folder: Path, ids: dict[str, int]) -> None:
    """Write the tokenizer of the pieces ``ids``, and two files that transformers reads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    # No merges: a word is one piece (ignore_merges) or its bytes.
    model = models.BPE(ids, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", ids["<s>"])]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (
        ("tokenizer.json", json.loads(tokenizer.to_str())),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", names),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
