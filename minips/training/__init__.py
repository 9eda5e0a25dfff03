"""Training of the mapper and the synthesizer's LoRA on frozen base weights (arXiv 2606.14672, equation 21)."""
