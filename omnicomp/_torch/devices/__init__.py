"""Torch's hooks for devices: Inductor's code generation, interfaces, the dispatcher."""
