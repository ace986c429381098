"""Exchanged functions are put back, whoever leaves last, and wrappers of others stay."""

from types import ModuleType

from omnicomp._torch.repairs.needed import Exchange


def answering() -> tuple[ModuleType, Exchange]:
    module = ModuleType("answering")
    module.answer = lambda: 1  # type: ignore[attr-defined]
    return module, Exchange(module, "answer", lambda original: lambda: original() + 10)


def test_who_leaves_last_puts_it_back() -> None:
    module, exchange = answering()
    original = module.answer
    exchange.__enter__()
    with exchange:
        assert module.answer() == 11
    assert module.answer() == 11
    exchange.__exit__(None, None, None)
    assert module.answer is original


def test_a_wrapper_that_another_library_put_over_it_stays_and_reaches_the_original() -> None:
    module, exchange = answering()
    with exchange:
        ours = module.answer
        theirs = module.answer = lambda: ours() + 100  # type: ignore[attr-defined]
        assert module.answer() == 111
    assert module.answer is theirs
    assert module.answer() == 101
    with exchange:
        assert module.answer() == 111, "once"
    assert module.answer is theirs
