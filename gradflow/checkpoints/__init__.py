"""Real models: read from a Hugging Face folder, pinned by fixtures, handed over as a Stack with given weights."""

from gradflow.checkpoints.families import FAMILIES
from gradflow.checkpoints.loading import load
from gradflow.checkpoints.model import Checkpoint
from gradflow.checkpoints.parity import Parity, ParityError, against, gate

__all__ = ["FAMILIES", "Checkpoint", "Parity", "ParityError", "against", "gate", "load"]
