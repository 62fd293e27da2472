"""Assay: correctness verdicts and comparison tables for multimodal model servers."""
