"""Scorers: outputs and judged tables to score rows, one module per modality."""
