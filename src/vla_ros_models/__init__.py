"""The models: the families of Vision-Language-Action policies and the engine that runs them, without ROS.

Usable from plain Python (``docs/models.md``). Imports of ``vla_ros`` only what crosses the boundary: types, errors,
options, the policies' interface and specification, and vision.
"""
