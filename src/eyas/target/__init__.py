"""The target as it lies on disk and in memory: its files, its structure, its head, and an embedded default."""
