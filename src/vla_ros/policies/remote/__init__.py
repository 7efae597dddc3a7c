"""Policies that another machine serves: one client for openpi, RoboArena, vLLM-Omni, SGLang, GR00T and OFT.

``messages`` encodes and decodes arrays; ``dialect`` says what differs between servers, with one module for each
family; ``dialects`` chooses.
"""
