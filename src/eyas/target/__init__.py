"""The target's files: digest, structure, head, and the embedded default target."""
