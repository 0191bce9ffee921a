"""Quantised weights: which checkpoints there are (`scheme`), how they lie (`formats`, `ggml`), and the one layout
they are brought into (`packed` in numpy; `octavo.kernels.quant` on a device, with the products)."""
