"""Runs a vision-language-action model on a GPU, with the same tokens as plain decoding.

``decoder`` has one layer and the passes of a language model, ``flow`` those of flow matching, written once over
``ops`` (torch) or ``triton_ops`` (``few_rows``, ``many_rows``, ``kernels``, ``tile_configs``), for any description
in ``shapes``, with ``weights`` as loaded or fused and packed (``lowbit``, ``fp8``). ``token_engine`` answers
requests: ``graph_engine`` holds the CUDA graphs of each prompt length, ``runner`` runs them on the device,
``drafts`` saves decoder passes, ``resizer`` and ``resample`` prepare camera images. ``kernel_check`` compares the
kernels with torch at start, within ``tolerances``. ``flow_engine`` answers requests for flow matching. Importing
this package does not import torch. See docs/engine.md.
"""
