"""The pass as the pipeline sees it."""

from lowered import Block, compiled, rand

from omnicomp.timeline import Rewrite


def test_keep_does_nothing():
    fn, backend = compiled(Block(), "keep")
    fn(rand(2, 8, 32))
    assert not backend.modified
    assert not backend.of(Rewrite)
