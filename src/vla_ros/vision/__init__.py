"""From the bytes of a camera message to the image that a checkpoint saw in training.

``messages`` reads and writes the CDR of the two image messages, ``decode`` turns them into RGB, ``geometry`` makes
them upright and names the centre crop, ``processors`` resizes exactly as the training code did, and ``preprocess``
strings these together. Needs numpy, OpenCV, simplejpeg and Pillow; neither ROS nor torch.
"""
