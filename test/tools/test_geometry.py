"""The table of the geometry study."""

import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from tools.geometry import compared, table


def test_both_columns_count_the_scenes_that_both_have() -> None:
    """The column without tokens counted all of its scenes, so that it did not agree with the difference."""
    plain = {(0, "pick", state): state < 6 for state in range(10)}
    other = {(0, "pick", state): state in (1, 2, 7) for state in range(4, 12)} | {(1, "pick", 0): True}
    row = compared(plain, other)
    assert (row["plain"], row["other"], row["pairs"]) == ([2, 6], [1, 6], 6)
    assert row["difference"] == pytest.approx(-1 / 6)
    shown = table([{"shift": 0, "place": "as trained", "with": "tokens", **row}]).splitlines()[-1]
    assert [cell.strip().partition(" (")[0] for cell in shown.split("|")[4:7]] == ["2 of 6", "1 of 6", "-16.7"]
    assert compared(plain, {}) == {**compared({}, other)}
