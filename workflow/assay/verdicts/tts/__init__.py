"""Verdicts on speech synthesis: its gates, and the faults planted to prove them."""
