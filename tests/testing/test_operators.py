import pytest
import torch

from omnicomp.testing.operators import Transfer, host, kept

BASE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.t()[1:, ::2],
        BASE[:1].expand(3, 6),
        BASE[2, 3],
        BASE[:0],
        BASE.unfold(1, 3, 2),
        torch.complex(BASE, BASE).conj(),
        torch.complex(BASE, BASE).conj().imag,
        BASE.to_sparse(),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_copy_has_the_values_and_strides_of_its_original(tensor, whole):
    copy = kept(tensor, whole=whole)
    assert copy.layout == tensor.layout
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided:
        assert copy.stride() == tensor.stride()
        assert (copy.is_conj(), copy.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if tensor.numel() and tensor.layout is torch.strided:
        assert copy.data_ptr() != tensor.data_ptr()


def test_a_whole_copy_can_be_looked_at_beyond_the_view():
    view = BASE[1:3, 1:3]
    assert torch.equal(kept(view, whole=True).as_strided((4, 6), (6, 1), 0), BASE)


def test_a_structure_is_brought_over_with_its_sharing_and_its_devices():
    x = torch.ones(2, requires_grad=True)
    moved = Transfer("meta")({"a": [x, x], "device": torch.device("cpu"), "name": "cpu", "other": 3})
    assert moved["a"][0] is moved["a"][1]
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][0].requires_grad
    assert moved["device"] == torch.device("meta")
    assert (moved["name"], moved["other"]) == ("meta", 3)
    assert not host(x).requires_grad
