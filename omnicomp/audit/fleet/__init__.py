"""One report of a folder of timelines."""
