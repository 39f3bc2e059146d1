"""A drafter for others to load: what each engine expects, written, told and checked."""
