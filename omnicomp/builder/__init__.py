"""One graph after autograd becomes a callable: place, cut, build, find what fails, remember it, restore it."""
