"""A pass, an override, an engine and a device for omnicomp, made of NumPy; entry points in pyproject.toml name them."""
