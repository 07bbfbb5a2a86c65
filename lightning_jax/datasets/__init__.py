from lightning_jax.datasets.files import DatasetError
from lightning_jax.datasets.spider import load_spider

__all__ = ["DatasetError", "load_spider"]
