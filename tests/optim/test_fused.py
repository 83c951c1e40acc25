"""The fused step unscales by `grad_scale` and leaves everything alone at `found_inf`."""

import copy

import pytest
import torch

from onecopy.optim.registry import make_fused, supports_fused_scaling

BUILDERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
}


def build(kind, fused=True, numel=37):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(numel))
    optimizer = BUILDERS[kind]([parameter])
    if fused:
        assert supports_fused_scaling(optimizer)
        make_fused(optimizer)
    return parameter, optimizer


def step(parameter, optimizer, gradient, scale=1.0, found_inf=0.0):
    parameter.grad = gradient * scale
    optimizer.grad_scale = torch.tensor(scale)
    optimizer.found_inf = torch.tensor(found_inf)
    optimizer.step()


def gradients(count, numel=37):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def snapshot(parameter, optimizer):
    state = optimizer.state[parameter]
    return {
        "weight": parameter.data.clone(),
        **{key: value.clone() for key, value in state.items() if value is not None},
    }


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


@pytest.mark.parametrize("kind", BUILDERS)
def test_equals_plain_torch(kind):
    ours, plain = build(kind), build(kind, fused=False)
    for gradient in gradients(5):
        step(*ours, gradient, scale=1024.0)
        plain[0].grad = gradient.clone()
        plain[1].step()
    torch.testing.assert_close(ours[0].data, plain[0].data, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("scale", [2.0**16, 0.125])
def test_powers_of_two_are_divided_out_exactly(kind, scale):
    scaled, unscaled = build(kind), build(kind)
    for gradient in gradients(4):
        step(*scaled, gradient, scale=scale)
        step(*unscaled, gradient)
    assert_same(snapshot(*scaled), snapshot(*unscaled))
    assert torch.equal(scaled[0].grad, unscaled[0].grad)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_found_inf_leaves_weights_moments_and_step_unchanged(kind, poison):
    parameter, optimizer = build(kind)
    first, second = gradients(2)
    step(parameter, optimizer, first)
    before = snapshot(parameter, optimizer)
    second[3] = poison
    step(parameter, optimizer, second, scale=8.0, found_inf=1.0)
    assert_same(snapshot(parameter, optimizer), before)


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_skipped_first_step_leaves_no_trace(kind):
    """Fused SGD allocates its momentum uninitialised and would keep that memory when its first step is skipped."""
    skipped, clean = build(kind), build(kind)
    junk = [torch.full((37,), float("nan")) for _ in range(64)]
    del junk
    step(*skipped, torch.full((37,), float("inf")), scale=4.0, found_inf=1.0)
    for gradient in gradients(3):
        step(*skipped, gradient, scale=4.0)
        step(*clean, gradient, scale=4.0)
    assert_same(snapshot(*skipped), snapshot(*clean))


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("made_before_load", [True, False])
def test_continues_from_a_state_that_was_saved_unfused(kind, made_before_load):
    plain = build(kind, fused=False)
    history = gradients(6)
    for gradient in history[:3]:
        plain[0].grad = gradient.clone()
        plain[1].step()
    saved = copy.deepcopy(plain[1].state_dict())
    parameter, optimizer = build(kind, fused=made_before_load)
    parameter.data.copy_(plain[0].data)
    optimizer.load_state_dict(saved)
    if not made_before_load:
        make_fused(optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    for gradient in history[3:]:
        step(parameter, optimizer, gradient, scale=64.0)
        plain[0].grad = gradient.clone()
        plain[1].step()
    torch.testing.assert_close(parameter.data, plain[0].data, rtol=2e-6, atol=1e-7)


def test_groups_added_later_and_rates_changed_in_flight():
    parameter, optimizer = build("sgd momentum")
    late = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    optimizer.param_groups[0]["lr"] = 0.0
    before = parameter.data.clone()
    late.grad = torch.ones(3) * 4
    step(parameter, optimizer, gradients(1)[0], scale=4.0)
    assert torch.equal(parameter.data, before)
    torch.testing.assert_close(late.data, torch.full((3,), -1.0), rtol=0.2, atol=0)


def test_tensor_rate_and_empty_tensor():
    parameter = torch.nn.Parameter(torch.zeros(0))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1))
    make_fused(optimizer)
    step(parameter, optimizer, torch.zeros(0), found_inf=0.0)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(1))]),
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], foreach=True),
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=False),
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], capturable=True),
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], differentiable=True),
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], momentum=0.9, dampening=0.5),
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))]),
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device="meta"))]),
        type("Mine", (torch.optim.AdamW,), {})([torch.nn.Parameter(torch.zeros(1))]),
        object(),
    ],
    ids=["rmsprop", "foreach", "not fused", "capturable", "differentiable", "damped", "complex", "meta", "own", "none"],
)
def test_optimizers_without_such_a_step_are_left_alone(optimizer):
    assert not supports_fused_scaling(optimizer)
    with pytest.raises(ValueError, match="no fused step"):
        make_fused(optimizer)


def test_a_users_own_choice_of_fused_is_supported():
    assert supports_fused_scaling(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True))
