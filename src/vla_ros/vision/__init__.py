"""Converts camera messages to images as the checkpoint saw them in training, without ROS or torch.

``messages`` reads and writes the CDR of both image messages, ``decode`` converts them to RGB, ``geometry`` has the
orientations and the centre crop, ``processors`` resizes as the training code did, and ``preprocess`` chains these
steps.
"""
