import logging

import pytest

pytest.importorskip("cyclonedds", reason="the library cyclonedds is not installed (extra 'dds')")

from vla_ros.graph.dds.node import node_logger


class _Secretive(logging.Logger):
    """As ROS's `launch`, once imported, makes every new logger of the process."""

    def __init__(self, name, level=logging.NOTSET):
        super().__init__(name, level)
        self.propagate = False


@pytest.mark.parametrize("kind", [logging.Logger, _Secretive])
def test_a_line_is_written_once_and_as_rclpy_writes_it(kind, capfd):
    before = logging.getLoggerClass()
    logging.setLoggerClass(kind)
    try:
        logger = node_logger(f"/arm/{kind.__name__.strip('_')}")
    finally:
        logging.setLoggerClass(before)
    logger.warning("careful")
    said = capfd.readouterr().err
    assert said.count("careful") == 1
    assert said.startswith("[WARN] [")
    assert f"[arm.{kind.__name__.strip('_')}]: careful" in said
