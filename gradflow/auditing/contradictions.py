"""What ``gradflow check`` says of a checkpoint's architecture, read off its config and the plan that was made of it."""

import functools

from gradflow.branches.mlp import MLP
from gradflow.checkpoints import Checkpoint
from gradflow.linting.architectures import LAYOUTS, Architecture, of_config
from gradflow.linting.constants import Finding
from gradflow.linting.lint import lint

ABOUT_THE_LAW = ("block",)  # how the law's figures are to be read; an audit shows none of them


@functools.cache
def contradictions(architecture: Architecture) -> tuple[Finding, ...]:
    """What `gradflow.linting.lint` finds, errors first."""
    return tuple(finding for finding in lint(architecture).findings if finding.key not in ABOUT_THE_LAW)


def architecture_of(checkpoint: Checkpoint) -> Architecture | None:
    """As `gradflow.linting.architectures` reads the config; of another family, from its plan.

    ``None`` where the law has no branch like its own (experts, parallel ones).
    """
    plan, config = checkpoint.plan, checkpoint.config
    if plan.parallel or not isinstance(plan.mlp, MLP):
        return None
    if any(config.get("model_type") in layout.model_types for layout in LAYOUTS):
        return of_config("config.json", config)
    return Architecture(
        file="config.json",
        scheme=plan.scheme.name,
        depth=plan.depth,
        d=plan.d,
        block=("attention:causal" if plan.attention.causal else "attention", plan.mlp.name),
        norm=checkpoint.stack.norm,
        final_norm=plan.final_norm,
        model_type=config.get("model_type"),
    )
