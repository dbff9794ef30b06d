"""Modules that torch and Megatron import only when they are first used; here they are imported once, in the warm process."""

from __future__ import annotations
