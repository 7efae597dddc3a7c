"""Recorded bags as data sets for training."""
