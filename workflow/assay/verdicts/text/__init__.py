"""Text: its gates, its planted controls, and the suite of both."""
