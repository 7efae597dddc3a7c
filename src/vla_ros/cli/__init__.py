"""The command ``vla-ros``."""
