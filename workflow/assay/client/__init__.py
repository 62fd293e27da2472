"""Clients: they send a sample set to a served arm and bring back one `responses` row per planned item."""
