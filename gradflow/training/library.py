"""optax, loaded when it is first asked for."""

import functools
from types import ModuleType


@functools.cache
def optax() -> ModuleType:
    """The library.

    Raises
    ------
    ValueError
        One line that says which extra brings it.
    """
    try:
        import optax
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        raise ValueError("training needs optax, which is not installed; pip install gradflow[train]") from None
    return optax
