"""Servers under test: how one is launched, owned, identified and stopped."""
