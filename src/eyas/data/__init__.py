"""Conversations to samples: sources, chat template and loss mask, sample table."""
