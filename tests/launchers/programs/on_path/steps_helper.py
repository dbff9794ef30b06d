"""A module that only the pool's own PYTHONPATH leads to."""

MARK = "found"
