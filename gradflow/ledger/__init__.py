"""The claims ledger: statements of the article and the primer, each with its measurement and a verdict computed from it.

    rows (article, placements, learning) → catalogue → measures (jacobians, initial, lowest, placement, trained)
         → results.json → book → tables, shell

A row says the statement, the command, and under which circumstances which figure must lie where. No verdict is written down:
`gradflow.ledger.claim.judge` computes it from the stored figures. `gradflow.claims` is the public call; `python
benchmarks/claims.py` measures and stores again.
"""
