"""All rows, in the order in which they are shown."""

from gradflow.ledger import article, learning, placements
from gradflow.ledger.claim import Claim

CLAIMS: tuple[Claim, ...] = (*article.CLAIMS, *placements.CLAIMS, *learning.CLAIMS)
BY_NAME = {claim.name: claim for claim in CLAIMS}
