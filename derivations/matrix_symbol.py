r"""Why index calculus: SymPy's MatrixSymbol calculus is silently wrong for x/‖x‖.

Claim. At x = (1, 2, 2), ‖x‖ = 3, the derivative of x/‖x‖ is

.. math::  \frac1{27}\begin{pmatrix} 8 & -2 & -2 \\ -2 & 5 & -4 \\ -2 & -4 & 5 \end{pmatrix}

by components, by index calculus and by autodiff, while SymPy 1.14 answers I/‖x‖ = I/3 through ``MatrixSymbol``: it
treats the length as a constant and says so nowhere. The derivative of a sum of two lengths comes out as 0, and so
does that of xᵀx. This essay pins the behaviour down; when SymPy mends it, the second half fails and may be deleted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic.index import evaluate, i, j, k, partial, total, vector

at = (1, 2, 2)
truth = sp.Matrix([[8, -2, -2], [-2, 5, -4], [-2, -4, 5]]) / 27

# By components: three symbols, nothing clever.
entries = sp.Matrix(sp.symbols("x0:3", real=True))
by_components = (entries / sp.sqrt(entries.dot(entries))).jacobian(entries).subs(dict(zip(entries, at, strict=True)))
assert by_components == truth

# By index calculus, for symbolic d, then evaluated at d = 3, and at 4 and 5 against the components.
x = vector("x")
index_jacobian = partial(x[i] / sp.sqrt(total(x[k] ** 2, k)), x[j])
assert evaluate(index_jacobian, 3, {x: at}, (i, j)) == truth
for point in ((1, 1, 1, 1), (1, 1, 1, 2, 3)):
    more = sp.Matrix(sp.symbols(f"x0:{len(point)}", real=True))
    explicit = (more / sp.sqrt(more.dot(more))).jacobian(more).subs(dict(zip(more, point, strict=True)))
    assert evaluate(index_jacobian, len(point), {x: point}, (i, j)) == explicit

# By autodiff.
with jax.enable_x64(True):
    by_jax = jax.jacfwd(lambda a: a / jnp.linalg.norm(a))(jnp.asarray(at, dtype=jnp.float64))
assert np.allclose(by_jax, np.array(truth.tolist(), dtype=float), rtol=1e-14, atol=1e-16)
print("components, index calculus and JAX agree on", truth.tolist())

# By MatrixSymbol: no error, and the wrong matrix.
symbol = sp.MatrixSymbol("x", 3, 1)
length = sp.sqrt((symbol.T * symbol)[0])
wrong = (symbol / length).diff(symbol).subs(symbol, sp.Matrix(at)).doit().as_explicit()
assert wrong == sp.eye(3) / 3
assert wrong != truth
# Euler's test would have caught it: J x must vanish, and here it is x/3.
assert truth * sp.Matrix(at) == sp.zeros(3, 1)
assert wrong * sp.Matrix(at) == sp.Matrix(at) / 3
print("MatrixSymbol answers", wrong.tolist(), "silently: it takes the length for a constant")

# With symbolic d it is no better, and the derivative of a sum of two lengths is lost altogether.
d = sp.Symbol("d", integer=True, positive=True)
a, b = sp.MatrixSymbol("a", d, 1), sp.MatrixSymbol("b", d, 1)
lengths = sp.sqrt((a.T * a)[0]) + sp.sqrt(((a - b).T * (a - b))[0])
assert lengths.diff(a) == sp.ZeroMatrix(d, 1)
assert (a.T * a)[0].diff(a) == sp.ZeroMatrix(d, 1)  # even of the square of one length, where 2a is right
y = vector("y")
right = partial(sp.sqrt(total(x[k] ** 2, k)) + sp.sqrt(total((x[k] - y[k]) ** 2, k)), x[j])
assert evaluate(right, 3, {x: at, y: (0, 0, 0)}, (j,)) == 2 * sp.Matrix(at) / 3
print("d/da (|a| + |a-b|): MatrixSymbol answers", lengths.diff(a), "and index calculus", right)
