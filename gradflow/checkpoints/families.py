"""The families of models that are read, a row each: encoders, causal models with attention or a recurrence, and both in one."""

from collections.abc import Mapping
from typing import Any

from gradflow.checkpoints.decoders import DECODERS
from gradflow.checkpoints.encoders import ENCODERS
from gradflow.checkpoints.plan import Family, Plan, plan
from gradflow.checkpoints.recurrent import RECURRENT
from gradflow.checkpoints.t5 import ENCODER_DECODERS

FAMILIES = (*ENCODERS, *DECODERS, *RECURRENT, *ENCODER_DECODERS)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the row that a config's ``model_type`` names.

    Raises
    ------
    ValueError
        If it names none; the message lists those that are read.
    """
    stated = config.get("model_type")
    for family in FAMILIES:
        if stated in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"checkpoint: config.json's 'model_type' is {stated!r}; read are {known}")


def plan_of(config: Mapping[str, Any]) -> tuple[Family, Plan]:
    """The row, and what it makes of the config; raises as `family_of` and `gradflow.checkpoints.plan.plan`."""
    family = family_of(config)
    return family, plan(family, config)
