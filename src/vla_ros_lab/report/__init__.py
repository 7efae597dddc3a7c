"""Parts of self-contained HTML reports: one file, no network, light and dark, readable on a phone.

``markup`` escapes text, ``page`` lays out the page, ``charts`` draws SVG, and ``images`` embeds images. ``sim`` and
``replay`` build their reports from these parts.
"""
