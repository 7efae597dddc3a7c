"""Parts of self-contained HTML reports: one file, no network, light and dark, readable on a phone.

``markup`` escapes, ``page`` lays out, ``charts`` draws SVG, ``images`` embeds images. The reports of ``sim`` and
``replay`` are made of these.
"""
