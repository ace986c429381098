"""For authors of devices, conformance and bring-up; for users' tests, the pytest plug-in."""
