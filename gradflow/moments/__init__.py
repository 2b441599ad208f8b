"""Moments at initialisation that no formula gives: integrands and sums are `gradflow.symbolic`'s, evaluated by quadrature.

`averages`: E g(z, p) over a Gaussian, at any power p; `kernels`: two tokens through a branch, by their angle; `softmax`: of
attention's weights; `top_k`: of a router's; `grams`: what attention does to the Gram of tokens. `chebyshev` keeps their tables.
"""
