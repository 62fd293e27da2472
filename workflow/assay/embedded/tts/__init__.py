"""A speech server over models' own packages. It runs in their environment: no torch, and nothing that judges."""
