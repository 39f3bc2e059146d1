"""The drafter: its shape, its weights, its vocabulary, its checkpoint."""
