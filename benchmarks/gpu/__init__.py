"""The stages of ``benchmarks/gpu_session.py``."""
