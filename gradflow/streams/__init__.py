"""Schemes that one residual stream cannot hold, beside their kin of one stream: rows, stack, jacobian, flow, law."""

from gradflow.streams.rows import (
    BY_NAME,
    STREAM_SCHEMES,
    Composite,
    Manifold,
    Place,
    Static,
    StreamNumbers,
    StreamScheme,
    Written,
    any_scheme,
    composite,
    hyper_connections,
    manifold,
    sinkhorn,
)

__all__ = [
    "BY_NAME",
    "STREAM_SCHEMES",
    "Composite",
    "Manifold",
    "Place",
    "Static",
    "StreamNumbers",
    "StreamScheme",
    "Written",
    "any_scheme",
    "composite",
    "hyper_connections",
    "manifold",
    "sinkhorn",
]
