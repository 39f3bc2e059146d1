"""Who computes hidden states: the seam (`base`) and its adapters."""
