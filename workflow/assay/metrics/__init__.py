"""Metrics: pure functions of arrays. No files, no network, no torch."""
