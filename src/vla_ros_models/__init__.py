"""The models: the families of Vision-Language-Action policies and the engine that runs them, without ROS.

Usable from plain Python (``docs/python.md``). Imports of ``vla_ros`` only what crosses the boundary: types, errors,
options, the policies' interface and specification, and vision.
"""

import os

# Before torch is imported: threads that spin while they wait for each other take the cores from those they wait
# for, so that on a busy machine an inference with several is ten times slower than with one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
