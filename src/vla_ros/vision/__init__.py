"""Turns the bytes of a camera message into an image as the checkpoint saw it in training; needs no ROS, no torch.

``messages`` reads and writes the CDR of both image messages, ``decode`` converts to RGB, ``geometry`` has the
orientations and the centre crop, ``processors`` resizes as the training code did, ``preprocess`` chains these
steps.
"""
