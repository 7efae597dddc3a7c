"""A bag whose SQLite file asks for endless work is refused at once."""

import contextlib
import sqlite3
from time import process_time

import pytest

from vla_ros_lab.replay.bag import Bag
from vla_ros_lab.replay.storage import BagError

VIEWS = {
    "topics": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'x' AS name, "
    "'std_msgs/msg/String' AS type, 'cdr' AS serialization_format FROM n",
    "topics without rows": "SELECT * FROM kept a, kept b, kept c, kept d, kept e, kept f, kept g, messages h, "
    "messages i WHERE a.id + h.id = -1",
    "messages": "SELECT a.id AS id, 1 AS topic_id, b.timestamp AS timestamp, a.data AS data FROM kept a, kept b, "
    "kept c, kept d, kept e, kept f, kept g",
}


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_without_end_is_no_table_of_a_bag(write_bag, small_recording, view: str, renamed: bool) -> None:
    """``renamed``: the schema calls the view a table."""
    path, table = write_bag("views", small_recording, storage="sqlite3"), view.split()[0]
    [file] = path.glob("*.db3")
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute(f"ALTER TABLE {table} RENAME TO kept")
        database.execute(f"CREATE VIEW {table} AS {VIEWS[view]}")
        if renamed:
            database.execute("PRAGMA writable_schema = ON")
            database.execute("UPDATE sqlite_master SET type = 'table' WHERE name = ?", (table,))
        database.commit()
    began = process_time()
    with contextlib.suppress(BagError), Bag(path) as bag:
        assert list(bag.records(bag.topics)) == []
    assert process_time() - began < 5
