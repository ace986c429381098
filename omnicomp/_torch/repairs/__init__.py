"""Repairs of faults in torch; docs/design.md lists each with the versions that need it."""
