import re

import pytest

from tools.docs_check import SKIPPED, STAND_INS, Block, blocks, reason, run_block

ALL = tuple(blocks())
ONCE = {block.runs: block for block in reversed(ALL) if block.runs and not block.is_slow}
"""The first block of those with the same commands."""


@pytest.mark.parametrize("block", ONCE.values(), ids=str)
def test_a_documented_command_ends_well(block: Block) -> None:
    pytest.importorskip("cyclonedds", reason="cyclonedds is not installed (extra 'dds')")
    run_block(block)


def test_nothing_is_skipped_or_replaced_that_no_page_says() -> None:
    commands = [command for block in ALL for command in block.commands]
    assert len(commands) > 100
    for pattern in SKIPPED:
        assert any(re.search(pattern, command) for command in commands), pattern
    for text in STAND_INS:
        assert any(text in command for command in commands), text
    ours = [command for command in commands if command.startswith(("vla-ros", "python -m"))]
    assert 2 * sum(bool(reason(command)) for command in ours) < len(ours), "most of our own commands are run"


def test_a_command_that_fails_is_told() -> None:
    for command in ("vla-ros infer --nonsense", "false | cat", "vla-ros run -p nonsense:=1"):
        with pytest.raises(AssertionError, match=r"page\.md:3: .*\nended with status"):
            run_block(Block("page.md", 3, (command,)))
