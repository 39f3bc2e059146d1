"""Answers from the target, token ids kept."""
