"""The wire formats that the gateway speaks; each file translates one. `all.py` lists them."""
