"""Shared code of the launch files; only they import it, because it needs ``launch`` and ``launch_ros``.

Options are checked with the node's own code before anything starts.
"""
