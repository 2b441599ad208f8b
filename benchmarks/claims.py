"""The claims ledger measured again: `python benchmarks/claims.py [NAME …] [--write]`.

Stores figures in gradflow/ledger/results.json; --write writes derivations/claims.md from what is stored, alone with --page.
"""

import argparse
from pathlib import Path

import gradflow
from gradflow import checks
from gradflow.ledger import book, tables
from gradflow.ledger.catalogue import BY_NAME, CLAIMS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "derivations" / "claims.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="claims; all without any")
    parser.add_argument("--write", action="store_true", help="also write the page")
    parser.add_argument("--page", action="store_true", help="write the page from what is stored, and measure nothing")
    arguments = parser.parse_args()
    if not arguments.page:
        rows = [BY_NAME[checks.one_of("claim", name, BY_NAME)] for name in arguments.names] or CLAIMS
        seconds = book.remake(rows, ROOT, lambda done, total: print(f"{done} of {total}", flush=True))
        print(f"{gradflow.claims(*(row.name for row in rows))}\n{seconds:.0f} s")
    if arguments.write or arguments.page:
        PAGE.write_text(tables.page(gradflow.claims()), encoding="utf-8")


if __name__ == "__main__":
    main()
