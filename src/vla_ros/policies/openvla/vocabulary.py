"""Writes a whole-word tokenizer in Llama-2's layout, for small checkpoints with their own vocabulary.

Ids 0 to 2 are ``<unk>``, ``<s>`` and ``</s>``, 3 to 258 the bytes, then the words; one further id is a single space
and closes every prompt, as 29871 does in Llama-2. Words outside the vocabulary are spelled in bytes, so any text
can be encoded. The file is a ``tokenizer.json`` that the ``tokenizers`` library and
transformers' ``PreTrainedTokenizerFast`` read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vla_ros.policies.openvla.architecture import LLAMA2_EMPTY_TOKEN

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
    """Id of every piece. Each word has two: after a space (with the mark) and without one.

    ``empty_token`` is the id of the lone space mark; the words must fit below it, or it must lie below them.
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


def tokenizer_json(ids: dict[str, int]) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json`` for the pieces of :func:`word_ids`."""
    special = [
        {
            "id": ids[name],
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for name in ("<unk>", "<s>", "</s>")
    ]
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False},
                {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": True},
                {"type": "Punctuation", "behavior": "Isolated"},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": True},
            ],
        },
        # No merges: a word is one piece (ignore_merges) or its bytes.
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": True,
            "vocab": ids,
            "merges": [],
        },
    }


def write_tokenizer(folder: Path, ids: dict[str, int]) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (
        ("tokenizer.json", tokenizer_json(ids)),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", names),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
