"""What configuration fields are made of: bounded numbers and names, and the base of sections."""

from typing import Annotated

import msgspec
from msgspec import Meta

# No sensible count is near this; a larger one would overflow an int32 somewhere on its way.
LARGEST_COUNT = 2**31 - 1
# NumPy's generators, which vLLM seeds too, take no more.
LARGEST_SEED = 2**32 - 1

PositiveInt = Annotated[int, Meta(ge=1, le=LARGEST_COUNT)]
Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Seed = Annotated[int, Meta(ge=0, le=LARGEST_SEED)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=64)]
Path = Annotated[str, Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""
