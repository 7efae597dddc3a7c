"""Pixels as the checkpoint saw them in training: decode, orientation, crop, resize."""
