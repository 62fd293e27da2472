"""Assay: correctness verdicts and comparison tables for multimodal model servers."""

from importlib.metadata import version

__version__ = version("assay")
