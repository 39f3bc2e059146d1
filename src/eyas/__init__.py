"""eyas trains EAGLE-3 drafters from a verified data set of the target's hidden states."""

__version__ = "0.1.0"
