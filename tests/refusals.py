"""What every refusal must be: a ``ValueError`` of one line that says what is wrong."""

import pytest


def refused(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
