"""The laboratory: simulation, benchmarks, evaluation on recordings, data sets and reports.

May import ``vla_ros`` and ``vla_ros_models``; neither imports it.
"""
