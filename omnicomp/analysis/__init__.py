"""What can be said of an FX graph and of values: names, sources, costs, hashes, layouts, accuracy."""
