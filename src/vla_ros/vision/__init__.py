"""Converts camera messages to images as the checkpoint saw them in training, without ROS or torch.

``messages`` reads and writes the CDR of both image messages, ``decode`` converts them to RGB, ``processors``
resizes as the training code did, and ``preprocess`` applies the orientation and chains these steps.
"""
