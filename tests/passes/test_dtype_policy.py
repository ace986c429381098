"""The pass as the pipeline sees it."""

from lowered import Block, compiled, rand

from omnicomp.passes.base import Pass
from omnicomp.passes.dtype_policy import DtypePass
from omnicomp.timeline import Rewrite


def test_satisfies_the_protocol():
    assert isinstance(DtypePass(), Pass)


def test_keep_does_nothing():
    fn, backend = compiled(Block(), "keep")
    fn(rand(2, 8, 32))
    assert not backend.modified
    assert not backend.of(Rewrite)
