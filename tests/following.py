"""Whether networks follow a law of several tokens, at every sub-layer."""

import math

import numpy as np


def networks_follow(entry, seeds):
    """Mean power of gradient and trunk within max(5 %, 3 s.e.), s.e. < 8 %; cosines, and the weights' gradients."""
    assert entry.law is not None, entry.why
    for curve in ("log_exact", "log_trunk"):
        powers = np.exp(2 * (getattr(entry.measured, curve) - getattr(entry.law, curve)))
        error = powers.std(0, ddof=1) / math.sqrt(seeds)
        assert error.max() < 0.08
        assert np.all(np.abs(powers.mean(0) - 1) < np.maximum(0.05, 3 * error)), (curve, powers.mean(0), error)
    for name in ("token_cosine", "gradient_cosine"):
        gaps = getattr(entry.measured, name).mean(0) - getattr(entry.law, name)[0]
        assert np.abs(gaps).max() < 0.04, (name, gaps)
    weights = (entry.measured.weight_grad / entry.law.weight_grad) ** 2
    error = weights.std(0) / math.sqrt(seeds)
    assert np.all(np.abs(weights.mean(0) - 1) < np.maximum(0.08, 4 * error)), weights.mean(0)
