"""``tools/published.py`` on the checkpoints that are in the repository."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from tools import published
from vla_ros.config.checkpoints import folder_of

ROOT = Path(__file__).parents[2]
SMOLVLA = ROOT / "test" / "data" / "smolvla"


@pytest.mark.parametrize(
    ("folder", "options", "row"),
    [
        (
            folder_of("demo"),
            ["policy.unnorm_key:=table_10hz"],
            r"`openvla` \| image \| none \| 1 x 7 \| not compared",
        ),
        (folder_of("demo-pi"), ["preset:=libero"], r"`pi` \| .* \| not compared"),
        (ROOT / "checkpoints" / "libero", [], r"`pi` \| .* \| state \d+ \| \d+ x 7 \| not compared"),
        (
            SMOLVLA / "default",
            [f"policy.vlm:={SMOLVLA / 'vlm'}"],
            r"`smolvla` \| wrist, front \| state 6 \| .* x 6",
        ),
    ],
)
def test_a_checkpoint_that_is_here_gives_a_row(
    folder: Path, options: list[str], row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = ["policy.device:=cpu", "policy.dtype:=float32"]
    published.main(["--folder", str(folder), *(word for one in (*device, *options) for word in ("-p", one))])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("policy: ")
    assert re.match(rf"\| {re.escape(str(folder))} \| {row}", second)


def test_a_folder_that_is_refused_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"refused: .*has no config\.json"):
        published.main(["--folder", str(tmp_path)])
