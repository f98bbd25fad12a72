"""The way of gradients: hooks, packing, error feedback, clipping. See docs/fused-gradients.md."""
