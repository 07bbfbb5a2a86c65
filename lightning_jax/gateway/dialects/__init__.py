"""Wire formats of the gateway, each translated in one file. `all.py` lists them."""
