r"""Cross-attention at initialisation: where post-LN truly decays, and why a decoder is worse off than an encoder.

Claim. A decoder's cross-attention adds q_f = ρ_m + (1 − ρ_m) K₁, n_m tokens of memory having the cosine ρ_m, and returns
χ_f = (1 − ρ_m)² (K₁ − 2M₃ + M₂₂) at unit gains: nothing through values and keys, which are the memory's, and through its queries
less than it adds. In post-LN the power of the gradient takes the factor (1 + χ_f)/(1 + q_f) there.

Liu et al. 2020 (2004.08249) compared stacks of encoder blocks (self-attention, FFN) and decoder blocks (self, cross, FFN), and
found the gradient to vanish in post-LN's decoder alone. So says the law, and says of which memory: the decay 1/(1 + q_f) a block
is real where the memory's tokens are alike, ρ_m ≫ 1/n_m, as a deep post-LN encoder makes them (rank collapse,
`derivations/attention.py`); at ρ_m = 1 half of the power goes with every block. Of tokens that differ, q_f ~ e/n_m: little goes.
"""

import numpy as np

from gradflow import law
from gradflow.branches import CrossAttention
from gradflow.comparing import prescriptions
from gradflow.symbolic import derive

TOKENS, DEPTH = 16, 12
ENCODER = ("attention", "mlp:relu")


def decoder(cosine: float) -> tuple:
    """Blocks of self-attention, cross-attention and FFN."""
    return ("attention:causal", CrossAttention(memory=TOKENS, memory_cosine=cosine), "mlp:relu")


print("12 blocks, 16 tokens, a cotangent per token: power of the gradient at the input, and a block's share")
for scheme in ("post-ln", "pre-ln"):
    found = {"encoder": law(scheme, ENCODER, DEPTH, tokens=TOKENS)}
    found |= {
        f"decoder, memory {cosine}": law(scheme, decoder(cosine), DEPTH, tokens=TOKENS) for cosine in (0, 0.5, 1.0)
    }
    for name, profile in found.items():
        power = profile.exact[0, 0] ** 2
        print(f"{scheme:8} {name:20} {power:9.3g} {power ** (1 / DEPTH):.3f}")
    if scheme == "post-ln":
        powers = [profile.exact[0, 0] ** 2 for profile in found.values()]
        assert np.all(np.diff(powers[1:]) < 0)  # the more alike the memory, the less comes back
        assert powers[3] < 1e-3 * powers[0]

# Cross-attention alone: exactly 1/(1 + q_f) of a memory of equal tokens, and the query path's χ_f of others.
for cosine in (0.0, 0.5, 0.9, 1.0):
    at = CrossAttention(memory=TOKENS, memory_cosine=cosine).moments()
    kept, least = (1 + at.chi) / (1 + at.q), 1 / (1 + at.q)
    print(f"memory cosine {cosine}: q_f {at.q:.4f}, χ_f {at.chi:.4f}, kept {kept:.4f}, 1/(1 + q_f) {least:.4f}")
alike = law("post-ln", CrossAttention(memory_cosine=1.0), DEPTH)
assert abs(alike.exact[0, 0] ** 2 * 2**DEPTH - 1) < 1e-9

# The constants for a decoder make the branch small against the skip, so that what does not return is little too.
for name in ("deepnorm", "admin"):
    row = prescriptions.rows(name, encoder=DEPTH, decoder=DEPTH)["decoder"]
    held = law(row, decoder(1.0), DEPTH, tokens=TOKENS)
    print(f"{name:8} decoder, memory alike: trunk {held.trunk[0, 0]:.4f}, exact {held.exact[0, 0]:.4f}")

checks = derive("cross-attention").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
