"""Runs a vision-language-action model on a GPU, with the same tokens as plain decoding.

``decoder`` is the Llama, written once over ``ops`` (torch) or ``triton_ops`` (``kernels``, ``tile_configs``),
with weights as loaded (``llama``) or fused and packed (``weights``, ``int8``, ``int4``, ``lowbit``).
``executor`` answers requests: ``buckets``, ``step_graphs`` and ``graph_cache`` are the CUDA graphs of each
prompt length, ``runner`` the device, ``drafts`` saves passes, ``resizer`` and ``resample`` prepare camera
images; ``graph_engine`` is what the engines share. ``kernel_check`` compares kernels with torch at the
start, within ``tolerances``. ``flow_engine`` answers for pi0 and pi0.5: ``flow`` is the prefix pass and the
flow steps over ``gemma`` (torch) or ``triton_gemma``. Importing the package itself loads no torch. See
docs/engine.md.
"""
