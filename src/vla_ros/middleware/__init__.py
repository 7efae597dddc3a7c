"""Middleware profiles that do not lose large camera frames.

With default settings, every ROS 2 middleware loses most raw 1080p frames between two processes on one host.
``profiles.select_profile`` generates a profile for the ROS 2 distribution and the frame size;
``checks.check_profile`` checks whether it is in force.
"""
