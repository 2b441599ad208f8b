"""Cross-attention at initialisation: queries of the stream over keys and values of a memory that is not in the stream.

The memory is n tokens of unit rms and mutual cosine ρ_m. Given them and the queries' tokens the logits of random W_Q, W_K are
Gaussian with Cov(ℓ_ij, ℓ_i'j') ∝ ⟨x_i, x_i'⟩⟨m_j, m_j'⟩; the keys' shared part cancels in the softmax. So a row is that of
self-attention with the memory's Gram, (1, ρ_m), in place of the tokens', and the queries' own cosine as two rows' correlation.
Steps and checks: ``derive("cross-attention")``.
"""

import sympy
from sympy import Expr

from gradflow.symbolic import attention as law

rho = sympy.Symbol("rho_m", real=True)
MEMORY = {law.p: 1, law.c: rho}
LOGIT_VARIANCE: Expr = law.qq * law.kk * law.p * (1 - rho)  # p: the query's power


def mixed() -> law.Pair:
    """Gram of Σ_j a_ij m_j, of a query with itself and with another."""
    return law.Pair(*(e.subs(MEMORY) for e in law.mixed()))


def returned() -> law.Pair:
    """Gram of W_Qᵀ dL/dq_i, the only way back: values and keys are the memory's."""
    return law.Pair(*(law.qq * e.subs(MEMORY) for e in law.through_queries()))
