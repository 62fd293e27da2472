"""Judging: what the judge says of every output, one module per modality."""
