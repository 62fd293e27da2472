"""Transcripts: their gates, their planted controls, and the suite of both."""
