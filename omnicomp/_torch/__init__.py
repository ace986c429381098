"""Every import of a torch internal, one small module a concern; each is covered by a test on every supported torch."""
