"""Verdicts: scores and floors to gates, gates to one verdict, and the check that recomputes it."""
