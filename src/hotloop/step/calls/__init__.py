"""Which calls of a step are alike: their signature, shapes and padding, and batches looked at ahead."""
