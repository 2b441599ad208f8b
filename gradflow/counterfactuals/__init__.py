"""A trained network in other placements, and with single parts edited, on the very weights that it has.

`placements` moves norms, `edits` changes parts, `foretelling` predicts from one pass what `run` (``gradflow.what_if``) measures.
"""
