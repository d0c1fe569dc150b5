"""What every part of a request has in common: strict types, no NaN, lists that are checked up to their first fault.

Validating a body stops at the first bad item of a list: megabytes of bad ones would else be as many errors, and stall
everybody. Must not know any field.
"""

from collections.abc import Callable, Sized

from pydantic import BaseModel, ConfigDict

from treecore.errors import InvalidRequest

MAX_INT = 2**31 - 1


class Strict(BaseModel):
    """A frozen model without conversions: "1" is no number, true no integer."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


def at_most(limit: int, param: str) -> Callable[[object], object]:
    """A validator that counts before anything looks at the items; pydantic would look at all of an object's first."""

    def check(value: object) -> object:
        if isinstance(value, Sized) and len(value) > limit:
            raise InvalidRequest(f"{param}: at most {limit} entries are allowed", param)
        return value

    return check
