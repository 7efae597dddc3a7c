"""Turns the bytes of a camera message into the image that a checkpoint saw in training.

``messages`` reads and writes the CDR of the two image messages, ``decode`` turns them into RGB, ``geometry``
applies the orientation and computes the centre crop, ``processors`` resizes exactly as the training code did, and
``preprocess`` chains these steps. Needs numpy, OpenCV, simplejpeg and Pillow, but neither ROS nor torch.
"""
