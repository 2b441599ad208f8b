"""Spectra of whole-depth Jacobians, four ways behind one interface: dense, compact, matrix-free, Lyapunov.

`network` says what a spectrum is of; `dense`, `compact`, `krylov` and `lyapunov` compute it, each with its error; `forecast` says
what each will cost; `choice` is ``gradflow.spectrum``, `result` what it returns.
"""
