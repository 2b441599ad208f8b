"""One process of several: what `test_devices` runs under other numbers of devices; writes figures to a file."""

import sys

import jax
import numpy as np

if len(sys.argv) == 4:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))

import gradflow


def figures():
    """Seeds (profile, contraction), basis columns (dense), probes (matrix-free)."""
    mixed = gradflow.Stack.make("post-ln", ["attention", "mlp:gelu"], 2, 12)
    x = np.random.default_rng(0).standard_normal((3, 12))
    columns = gradflow.spectrum(mixed, tokens=3, method="dense", chunk=7)
    probes = gradflow.spectrum(mixed, tokens=3, method="matrix-free", top=3, pairs=12)
    seeds = gradflow.profile(mixed, x, seeds=5)
    whole = gradflow.contraction(depth=3, d=12, seeds=3)
    return {
        "columns": columns.singular_values,
        "probes": probes.log_rms_gain,
        "largest": probes.singular_values,
        "net": seeds.net,
        "exact": seeds.exact,
        "contraction": whole.log_exact,
        "values": whole.singular_values,
    }


if __name__ == "__main__":
    found = figures()
    np.savez(sys.argv[1], devices=jax.device_count(), **found)
