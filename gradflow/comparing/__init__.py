"""Schemes against each other at initialisation.

`ensembles`: random networks of one row and their law; `comparisons` (``gradflow.compare``) puts rows side by side, `designs`
solves the law for a scale, `prescriptions` (``gradflow.constants``) has the papers' constants and what they do there.
"""
