"""One decoder: weights in, logits out. Formats, sharding, attention kernels, tokenizer."""
