"""Depth laws: closed forms of `gradflow.symbolic`, lambdified, evaluated without building the network.

`depth` is ``gradflow.law``; `leading` the leading order for every row of the catalogue, `finite_width` its 1/d term and spread,
`tokens` the recursion of several tokens' Gram. Several residual streams have theirs in `gradflow.streams.law`.
"""

from gradflow.laws.depth import law

__all__ = ["law"]
