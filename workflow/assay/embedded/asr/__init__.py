"""Whisper over transformers on CPU, behind OpenAI's transcription route, with a switch that plants faults."""
