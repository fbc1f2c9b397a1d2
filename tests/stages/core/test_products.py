"""Products of bf16 matrices through fp32: against exact products, and torch's own kernels untouched where they are not asked for."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, scaled_dot_product_attention

from pedigree.stages.training.products import through_fp32

ULP = 2.0**-8
"""bf16 rounds by at most this, relative to the value."""


@pytest.fixture(autouse=True)
def widened() -> Iterator[None]:
    through_fp32(True)
    yield
    through_fp32(False)


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """The exact result of fp64 rounded to bf16, but for sums in fp32 that end on the other side of a tie."""
    rounded = exact.bfloat16()
    assert found.dtype == torch.bfloat16
    assert (found != rounded).float().mean() < 0.01
    assert ((found.double() - exact).abs() <= ULP * exact.abs() + 1e-4).all()


FORMS = {
    "mm": lambda a, b, c: a @ b,
    "linear": lambda a, b, c: linear(a, b.t().contiguous(), c[0]),
    "linear of rows": lambda a, b, c: linear(a[None].expand(2, -1, -1), b.t()),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
    "bmm": lambda a, b, c: torch.bmm(a.view(4, 16, 96), b.view(4, 96, 12)),
    "baddbmm": lambda a, b, c: torch.baddbmm(c.view(4, 16, 12), a.view(4, 16, 96), b.view(4, 96, 12)),
    "convolution": lambda a, b, c: conv1d(a.view(1, 64, 96), b.reshape(24, 64, 12)[:, :, :3], padding=1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_product_and_its_gradients_are_exact_but_for_one_rounding(form):
    # a: (64, 96), b: (96, 48) or the like, c: what is added
    shapes = {"convolution": ((64, 96), (384, 48), (1, 1)), "bmm": ((64, 96), (96, 48), (64, 12))}
    a, b, c = (made(*shape, seed=seed) for seed, shape in enumerate(shapes.get(form, ((64, 96), (96, 48), (64, 48)))))
    if form == "baddbmm":
        c = made(64, 12, seed=2)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        operands = [one.detach().to(dtype).requires_grad_() for one in (a, b)]
        out = FORMS[form](*operands, c.to(dtype))
        out.backward(made(*out.shape, seed=9).to(dtype))
        results.append((out.detach(), *(one.grad for one in operands)))
    for found, exact in zip(*results, strict=True):
        if form == "linear of rows" and found.shape == a.shape:  # autograd adds up the gradients of the two rows in bf16
            assert (found.double() - exact).abs().max() <= 2 * ULP * exact.abs().max()
        else:
            assert_rounded_once(found, exact)


def test_gradients_of_attention_are_near_the_exact_ones():
    query, key, value = (made(2, 3, 40, 16, seed=seed) for seed in range(3))
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        operands = [one.detach().to(dtype).requires_grad_() for one in (query, key, value)]
        scaled_dot_product_attention(*operands, is_causal=True).backward(made(2, 3, 40, 16, seed=9).to(dtype))
        gradients.append([one.grad for one in operands])
    for found, exact in zip(*gradients, strict=True):
        assert (found.double() - exact).abs().mean() <= 2 * ULP * exact.abs().mean()


@pytest.mark.integration  # torch's compiler starts a C++ compiler
@pytest.mark.nightly  # `tests/stages/test_kernels.py` compiles a model in bf16
def test_compiled_code_multiplies_through_fp32_too():
    a, b = made(64, 96), made(96, 48, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: torch.relu(a @ b) @ b.t())
    assert torch.equal(compiled(a, b), torch.relu(a @ b) @ b.t())


def test_a_product_into_a_given_tensor_goes_through_fp32_too():
    """As compiled code asks for it."""
    a, b = made(64, 96), made(96, 48, seed=1)
    assert_rounded_once(torch.mm(a, b, out=torch.empty(64, 48, dtype=torch.bfloat16)), a.double() @ b.double())


def test_products_of_other_dtypes_are_torchs_own():
    for dtype in (torch.float32, torch.float64, torch.int64):
        a, b = (made(8, 8, seed=seed).to(dtype) for seed in range(2))
        mine = a @ b, torch.bmm(a[None], b[None]), torch.addmm(a, a, b)
        through_fp32(False)
        own = a @ b, torch.bmm(a[None], b[None]), torch.addmm(a, a, b)
        through_fp32(True)
        assert all(torch.equal(one, other) for one, other in zip(mine, own, strict=True))


def test_torchs_own_kernels_come_back():
    assert "products.py" in torch._C._dispatch_dump("aten::mm")
    through_fp32(True)  # twice is once
    through_fp32(False)
    assert "products.py" not in torch._C._dispatch_dump("aten::mm")
    assert (made(4, 4) @ made(4, 4)).dtype == torch.bfloat16
