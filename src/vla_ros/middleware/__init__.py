"""Middleware profiles that do not lose large camera frames.

With default settings, every ROS 2 middleware loses most raw 1080p frames between two processes on one host.
``selection.select`` generates a profile for the sourced ROS 2 distribution and the frame size; ``checks.examine``
checks whether it is in force.
"""
