"""Whole numbers of knobs, shapes and machines: bounded, so that products of a few of them keep their value in 64 bits."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import Field

LARGEST = 10**9
"""Far above any batch, sequence or shape; a number beyond it is a slip of the keyboard."""
MOST_LAYERS = 10**5
"""A model is described layer by layer, and so is a pipeline."""
MOST_NODES = 10**5
MOST_GPUS_PER_NODE = 10**3

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Nodes = Annotated[int, Field(gt=0, le=MOST_NODES)]
GpusPerNode = Annotated[int, Field(gt=0, le=MOST_GPUS_PER_NODE)]
Ranks = Annotated[int, Field(gt=0, le=MOST_NODES * MOST_GPUS_PER_NODE)]


def divisors(number: int) -> list[int]:
    """All divisors of a whole number in order; none of 0. Takes the root of the number in steps and in memory."""
    if number == 0:
        return []
    small = np.arange(1, math.isqrt(number) + 1)
    small = small[number % small == 0]
    return sorted({*small.tolist(), *(number // small).tolist()})
