"""What commands read as JSON and write as files, seen from outside: real files, pipes and devices."""

import json
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from vla_ros.errors import CheckpointError, ConfigError, VlaRosError
from vla_ros.files import check_output, keeps_files, read_json_value, save_text
from vla_ros_models.checkpoint_files import read_json


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"x": ' + "9" * 5000 + "}", "limit"),
        ('{"a": {"b": 1, "b": 2}}', "'b' appears twice"),
        ("\xff", "decode|Expecting"),
    ],
)
def test_json_that_cannot_be_read_in_one_way_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=words):
        read_json_value(file)
    with pytest.raises(CheckpointError, match=str(file)):
        read_json(file)


def test_a_key_that_is_repeated_with_one_value_has_one_reading(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, null], "a": [1, null]}')
    assert read_json_value(tmp_path / "a.json") == {"a": [1, None]}


def test_a_pipe_or_device_is_no_json_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="a pipe, socket or device"):
            read_json(path)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(33 << 20)
    with pytest.raises(CheckpointError, match="larger than 32 MiB"):
        read_json(tmp_path / "large.json")


def test_a_file_is_replaced_as_a_whole_and_a_link_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    save_text(link, "after")
    assert link.is_symlink()
    assert file.read_text() == "after"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "link.json"]


def test_a_device_or_pipe_is_written_through(tmp_path: Path) -> None:
    save_text(Path("/dev/null"), "gone")
    (tmp_path / "link").symlink_to("/dev/null")
    save_text(tmp_path / "link", "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(VlaRosError, match="cannot be written"):  # nobody reads: an error instead of a wait
        save_text(tmp_path / "pipe", "lost")
    text = json.dumps(list(range(50_000)))  # more than a pipe holds
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True)
    got: list[str] = []
    collect = threading.Thread(target=lambda: got.append(reader.communicate(timeout=30)[0]))
    collect.start()
    while True:  # until the reader has opened its end
        try:
            save_text(tmp_path / "pipe", text)
            break
        except VlaRosError:
            assert reader.poll() is None
    collect.join(30)
    assert got == [text]
    assert not keeps_files(tmp_path / "pipe")
    assert not keeps_files(Path("/dev/null"))
    assert not keeps_files(Path("-"))


def test_a_misspelt_folder_is_an_error_and_stays_missing(tmp_path: Path) -> None:
    for write in (lambda path: save_text(path, "x"), lambda path: check_output("--json", path)):
        with pytest.raises(VlaRosError, match="cannot be written"):
            write(tmp_path / "nonexistent" / "a.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="is a folder"):
        check_output("--json", tmp_path)
