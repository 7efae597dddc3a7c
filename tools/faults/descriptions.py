"""Writes other descriptions of the demo's arm: without collision elements, or with a mesh that is truncated."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from vla_ros.kinematics.urdf import DEMO, resolve

TRUNCATED = b"\0" * 80 + (1000).to_bytes(4, "little") + b"\0" * 50
"""An STL file that announces more triangles than it has."""


def write(kind: str, folder: Path) -> Path:
    """Write the description ``visual`` (no collision elements) or ``truncated`` (a mesh) and return its file."""
    tree = ElementTree.parse(resolve(DEMO))
    for link in tree.getroot().findall("link"):
        for collision in link.findall("collision"):
            if kind == "visual":
                link.remove(collision)
            else:
                shape = collision.find("geometry")
                assert shape is not None
                shape.clear()
                ElementTree.SubElement(shape, "mesh", filename=f"{kind}.stl")
    (folder / f"{kind}.stl").write_bytes(TRUNCATED)
    path = folder / f"{kind}.urdf"
    tree.write(path)
    return path
