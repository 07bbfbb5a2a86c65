"""Parts of `accelerator.py`, which spends a short time on a borrowed accelerator."""
