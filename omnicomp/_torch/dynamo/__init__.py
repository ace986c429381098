"""Dynamo: its compile lock, graph breaks, late compilation, and forward-mode derivatives."""
