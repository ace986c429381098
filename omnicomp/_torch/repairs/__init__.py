"""Repairs of faults in torch; `NEEDED` of each names the releases that need it, and torch's issue."""
