"""The four ways of `gradflow.spectrum` against matmuls and SVD, each other, the plain product, one gradient, and one device."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain

import gradflow
from gradflow import precision
from gradflow.devices import placed
from gradflow.spectra import dense, krylov, lyapunov, ways
from gradflow.spectra.network import Network
from gradflow.stack import Drawn, Given, Stack

Row = tuple[str, float, str]
Timer = Callable[[dict[str, Callable[[], object]], int], dict[str, float]]
OPTIONS = ways.Options(top=None, pairs=28, probes=16, trace="hutchinson", every=None, chunk=None)


def linear(depth: int, d: int) -> Network:
    """Post-norm with given matrices, whose products are the floor."""
    k_x, k_w = jax.random.split(jax.random.key(0))
    w = 0.75 * jax.random.normal(k_w, (depth, d, d)) / d**0.5
    stack = Stack.make("post-ln", "linear", depth, d, norm="rms", eps=0.0)
    return Network(Given(({"w": w},)), jax.random.normal(k_x, (1, d)), stack)


def whole(interleaved: Timer, rounds: int) -> list[Row]:
    """Product and spectrum against the same matmuls and an SVD."""
    net, d = linear(24, 1024), 1024
    weights: Any = net.weights
    w, eye = weights.params[0]["w"], jnp.eye(d)
    matmuls = jax.jit(lambda w, b: jax.lax.scan(lambda b, w: (w @ b, None), b, w)[0])
    svd, matrix = jax.jit(lambda m: jnp.linalg.svd(m, compute_uv=False)), dense.whole(net).matrix[0]
    jobs = {"matmuls": lambda: matmuls(w, eye), "svd": lambda: svd(matrix), "whole": lambda: dense.whole(net).values}
    times = interleaved(jobs, rounds)
    floor = times["matmuls"] + times["svd"]
    return [("dense with spectrum / (24 matmuls + SVD), d = 1024", times["whole"] / floor, "≤ 1.25")]


def trunk(depth: int, d: int) -> Network:
    """The identity path behind constant branches."""
    stack = Stack.make("post-ln", "bias", depth, d)
    return Network(Drawn(jax.random.key(0)), precision.normal(jax.random.key(1), (1, d), "float64"), stack, "trunk")


def compact(interleaved: Timer, rounds: int) -> list[Row]:
    """The whole spectrum of the trunk, errors measured on both sides."""
    net, key = trunk(24, 2048), jax.random.key(2)
    jobs = {"dense": lambda: ways.by_dense(net, key, OPTIONS), "compact": lambda: ways.by_compact(net, key, OPTIONS)}
    one, two = (np.sort(job().logs) for job in jobs.values())
    np.testing.assert_allclose(np.exp(one), np.exp(two), rtol=0, atol=1e-12 * np.exp(one[-1]))
    times = interleaved(jobs, max(3, rounds // 5))
    wide = Stack.make("post-ln", "bias", 96, 65_536)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        gradflow.spectrum(wide, method="compact", path="trunk", announce=lambda _: None)
        seconds.append(time.perf_counter() - start)
    return [
        ("trunk, d = 2048, L = 24: dense / compact", times["dense"] / times["compact"], "≥ 200"),
        ("compact trunk, d = 65,536, L = 96, with compilation, s", seconds[0], "seconds"),
        ("compact trunk, d = 65,536, L = 96, again, s", min(seconds[1:]), "seconds"),
    ]


def tanh(depth: int, d: int) -> Network:
    """Post-norm with one MLP's matrices in every block, as their number is not what is timed."""
    stack = Stack.make("post-ln", "mlp:tanh", depth, d, norm="rms", eps=0.0)
    params = stack.block[0].init(jax.random.key(0), d, stack.dtype)
    return Network(Given((params,), tied=True), jax.random.normal(jax.random.key(1), (1, d)), stack)


def exponents(interleaved: Timer, rounds: int, name: str, net: Network) -> list[Row]:
    """All exponents at the spacing that the pilot chooses and at k = 4, against the product that they replace."""
    key, d = jax.random.key(2), net.x.size
    pilot = lyapunov.exponents(net, key, d, 1, lyapunov.PILOT)
    chosen = lyapunov.spacing(float(pilot.spread), "float64", d)
    product = jax.jit(lambda net: net.push(net.basis(0, d)))
    jobs: dict[str, Callable[[], object]] = {"product": lambda: product(net)}
    for every in {4, chosen}:
        jobs[f"{every}"] = functools.partial(lyapunov.exponents, net, key, d, every)
    times = interleaved(jobs, max(3, rounds // 3))
    one, four = (np.asarray(lyapunov.exponents(net, key, d, every).logs) for every in (1, 4))
    both = np.isfinite(one) & np.isfinite(four)  # at ε = 0 the last is −∞
    gap = np.abs(one[both] - four[both]).max() / net.layers
    found: list[Row] = [
        (f"Lyapunov, {name}, d = 512, L = 96: k that the pilot chooses", chosen, "≥ 4"),
        (f"Lyapunov, {name}: k = 4 off k = 1, largest exponent's difference", float(gap), "≤ 1e-10"),
    ]
    return found + [
        (f"Lyapunov, {name}: k = {every} / product", times[f"{every}"] / times["product"], "≤ 2.1")
        for every in sorted({4, chosen})
    ]


def matrix_free(interleaved: Timer, rounds: int) -> list[Row]:
    """Top 8 of T·d = 2,048 against dense, and the cost of a pair against one gradient of the same stack as a user writes it."""
    found: list[Row] = []
    for scheme in ("post-ln", "pre-ln"):
        stack = Stack.make(scheme, ("attention", "mlp:gelu"), 6, 128, eps=plain.EPS)
        given, x, c = plain.drawn(stack, 16)
        net, key, gradient = Network(given, x, stack), jax.random.key(2), plain.gradient(stack)
        top = krylov.ritz(net, key, 8, OPTIONS.pairs, 2)
        exact = dense.whole(net)
        scale = 2.0 ** (float(top.exponent) - float(exact.exponent))
        gap = np.abs(np.asarray(top.values) * scale / np.asarray(exact.values[:8]) - 1).max()
        jobs = {
            "gradient": lambda g=gradient, x=x, given=given, c=c: g(x, given.params, c),
            "ritz": lambda net=net, key=key: krylov.ritz(net, key, 8, OPTIONS.pairs, 2),
        }
        times = interleaved(jobs, rounds)
        pair = times["ritz"] / OPTIONS.pairs / times["gradient"]
        found.append((f"matrix-free, {scheme}, T·d = 2,048: top 8 off dense in 28 pairs, %", 100 * float(gap), "≤ 1"))
        found.append((f"matrix-free, {scheme}: gradients a pair, all included", pair, "≤ 1.1"))
    return found


def large() -> list[Row]:
    """T·d = 32,768, where no matrix fits: time and the worst residual of the top 8."""
    stack = Stack.make("post-ln", ("attention", "mlp:gelu"), 12, 512)
    given, x, _ = plain.drawn(stack, 64)
    found = gradflow.spectrum(stack, x, weights=given, method="matrix-free", announce=lambda _: None)
    worst = float(np.exp(found.log_error[0] - found.log_singular_values[0]).max())
    name = "matrix-free, post-ln, T = 64, d = 512, 12 blocks"
    return [(f"{name}: s, with compilation", found.seconds, ""), (f"{name}: largest residual / σ", worst, "")]


def dense_seconds(rounds: int) -> list[float]:
    """Median seconds of a whole dense spectrum, d = 512, L = 24, in this process: weights in place, and sent at every call."""
    net, found = linear(24, 512), []
    for each in (placed(net), net):
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            jax.block_until_ready(dense.whole(each))
            times.append(time.perf_counter() - start)
        found.append(float(np.median(times[1:])))
    return found


def devices(rounds: int) -> list[Row]:
    """Eight forced devices against one, each in a process of its own, taking turns."""
    times: dict[int, list[list[float]]] = {1: [], 8: []}
    for _ in range(3):
        for count in times:
            flags = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
            child = [sys.executable, str(Path(__file__)), str(rounds)]
            done = subprocess.run(child, env=flags, check=True, capture_output=True, text=True)
            times[count].append([float(seconds) for seconds in done.stdout.split()])
    kept, sent = np.median(times[8], 0) / np.median(times[1], 0)
    name = "dense, d = 512, L = 24: 8 forced devices / 1"
    return [
        (f"{name}, weights in place", float(kept), "≤ 1.3"),
        (f"{name}, weights sent at every call", float(sent), ""),
    ]


def rows(interleaved: Timer, rounds: int) -> list[Row]:
    """All of them, in float64."""
    found = whole(interleaved, rounds) + compact(interleaved, rounds)
    for name, make in {"linear": linear, "mlp:tanh": tanh}.items():
        found += exponents(interleaved, rounds, name, make(96, 512))
    return found + matrix_free(interleaved, rounds) + large() + devices(rounds)


if __name__ == "__main__":
    with precision.scope("float64"):
        print(*dense_seconds(int(sys.argv[1])))
