"""Exports recorded bags as data sets for training."""
