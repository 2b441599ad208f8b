"""Sweeps: every case of a plan beside its law, in a file that survives a kill.

axes → plan → run (``gradflow.sweep``) → store (SQLite, a transaction a row) → result → report, shell
"""
