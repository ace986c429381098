"""What the pass `legalise` is made of: which dtypes a device has, which operators ask for what, and the rewrite."""
