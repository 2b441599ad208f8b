"""One process of several: what `test_devices` runs under other numbers of devices; writes figures to a file."""

import sys

import jax
import numpy as np

if len(sys.argv) == 5:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[4]))

import gradflow


def figures(kind):
    """Basis columns (dense) and seeds (contraction); or in full: probes (matrix-free) and seeds of a profile, too."""
    mixed = gradflow.Stack.make("post-ln", ["attention"], 2, 12)
    columns = gradflow.spectrum(mixed, tokens=3, method="dense", chunk=7)
    whole = gradflow.contraction(depth=3, d=12, seeds=3)
    found = {"columns": columns.singular_values, "contraction": whole.log_exact, "values": whole.singular_values}
    if kind == "brief":
        return found
    probes = gradflow.spectrum(mixed, tokens=3, method="matrix-free", top=3, pairs=12)
    seeds = gradflow.profile(mixed, np.random.default_rng(0).standard_normal((3, 12)), seeds=5)
    found |= {"probes": probes.log_rms_gain, "largest": probes.singular_values}
    return found | {"net": seeds.net, "exact": seeds.exact}


if __name__ == "__main__":
    found = figures(sys.argv[2])
    np.savez(sys.argv[1], devices=jax.device_count(), **found)
