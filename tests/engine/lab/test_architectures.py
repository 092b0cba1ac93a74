"""The family in PyTorch: who may see what, which arms weigh the same, what reduces to what."""

import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F

from cflow.engine.lab.architectures import Output, Pipeline, Routing, build, n_parameters
from cflow.engine.lab.arms import ARMS, Arm, Shape
from oracles import pipelines

SMALL = Shape(
    vocab_size=4096, d_model=128, n_layers=6, n_heads=4, d_ff=512,
    n_experts=8, top_k=2, d_expert=128, context=256,
)  # fmt: skip


def run(model: Pipeline, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: Output = model(tokens)
    return output.logits


def test_arms_weigh_the_same() -> None:
    """By hand: attention, dense, experts and router, norms; embedding and head are untied."""
    block = 4 * 128**2 + 3 * 128 * 512 + 8 * 3 * 128**2 + 8 * 128 + 2 * 128
    model = 2 * 4096 * 128 + 128
    more = {"arch1": (2 * 6 + 1) * 128, "arch3": 6 * 128}  # norms of the second stream; gates
    for name, arm in ARMS.items():
        n_blocks = 2 if name == "arch5" else 6
        want = model + n_blocks * block + more.get(name, 0)
        assert n_parameters(build(arm, SMALL)) == want, name
    assert model + 6 * block == pytest.approx(5e6, rel=0.01)


def test_arms_of_one_seed_start_alike() -> None:
    def start(arm: Arm) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        return build(arm, pipelines.SHAPE).state_dict()

    want = start(ARMS["sequential"])
    for name in ARMS.keys() - {"arch5"}:  # it has fewer blocks
        got = start(ARMS[name])
        assert all(torch.equal(got[key], value) for key, value in want.items()), name


@pytest.mark.parametrize("name", ARMS)
def test_no_arm_sees_the_future(name: str) -> None:
    model = pipelines.build(ARMS[name])
    tokens = torch.tensor([pipelines.PROMPT])
    before = run(model, tokens)
    for changed in (1, 9, len(pipelines.PROMPT) - 1):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % pipelines.SHAPE.vocab_size
        after = run(model, other)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=5e-5)
        assert (after[:, changed] - before[:, changed]).abs().max() > 1e-2


def test_sequences_of_a_batch_do_not_meet() -> None:
    model = pipelines.build(ARMS["arch2_4_combined"])
    tokens = torch.tensor([pipelines.PROMPT, pipelines.PROMPT[::-1]])
    torch.testing.assert_close(run(model, tokens)[1:], run(model, tokens[1:]))


def test_arms_differ() -> None:
    """With the same weights no two arms of six layers compute the same."""
    tokens = torch.tensor([pipelines.PROMPT])
    logits = [run(pipelines.build(ARMS[name]), tokens) for name in ARMS]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 1e-2


def test_late_experts_land_after_the_last_layer() -> None:
    """A delay past the end is the delay that ends there: nothing is dropped."""
    tokens = torch.tensor([pipelines.PROMPT])
    n_layers = pipelines.SHAPE.n_layers
    latest = run(pipelines.build(Arm("x_in", "x_in", n_layers - 1)), tokens)
    beyond = run(pipelines.build(Arm("x_in", "x_in", n_layers + 5)), tokens)
    assert torch.equal(latest, beyond)


def test_closed_registers_are_the_sequential_model() -> None:
    model = pipelines.build(ARMS["arch3"])
    with torch.no_grad():
        gates = model.get_parameter("gates")
        gates.zero_()
    baseline = pipelines.build(ARMS["sequential"])
    baseline.load_state_dict({k: v for k, v in model.state_dict().items() if k != "gates"})
    tokens = torch.tensor([pipelines.PROMPT])
    torch.testing.assert_close(run(model, tokens), run(baseline, tokens), rtol=0, atol=1e-3)


def test_gelu_is_on_up() -> None:
    shape = replace(pipelines.SHAPE, n_layers=1)
    block = pipelines.build(Arm(), shape).block(0)
    x = torch.randn(1, 3, shape.d_model, generator=torch.Generator().manual_seed(0))
    gate, up, down = (block.dense.get_parameter(name) for name in ("gate", "up", "down"))
    want = ((x @ gate.T) * F.gelu(x @ up.T, approximate="tanh")) @ down.T
    torch.testing.assert_close(block.dense(x), want)


def test_balance_loss_is_1_where_routing_is_even_and_n_where_it_collapsed() -> None:
    even = Routing(torch.arange(8).view(4, 2), torch.full((4, 8), 1 / 8))
    assert even.balance().item() == pytest.approx(1)
    collapsed = torch.zeros(4, 8)
    collapsed[:, 0] = 1
    assert Routing(torch.zeros(4, 1, dtype=torch.int64), collapsed).balance().item() == 8


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="4 passes"):
        build(Arm(passes=4), SMALL)
