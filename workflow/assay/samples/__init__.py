"""Sample sets: the fixed, hashed list of requests that every server of a family is sent."""

from __future__ import annotations

from assay.samples.lock import build_set, load_set, read_lock, verify_set, write_lock
from assay.samples.recipe import Recipe, read_recipe

__all__ = ["Recipe", "build_set", "load_set", "read_lock", "read_recipe", "verify_set", "write_lock"]
