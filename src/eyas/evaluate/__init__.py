"""Acceptance: from stored states alone, and in real speculative decoding."""
