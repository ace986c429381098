"""What the tests, the benches and the examples share; needs the extra `test` or `bench`."""
