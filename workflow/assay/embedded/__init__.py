"""Assay's own CPU engine: an OpenAI-compatible server over transformers, with a switch that plants faults."""
