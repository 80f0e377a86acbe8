"""FP8 quantization, layers and AdamW: a plain-PyTorch reference beside every Triton kernel."""
