"""Optimizers by name, and the ones that must not step shards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onecopy.errors import ConfigError
from onecopy.optim.registry import ELEMENTWISE, build_optimizer, refuse_reason

REFUSED_BY_TORCH = ("LBFGS", "Adafactor", "SparseAdam")


def parameters(count=2):
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]


@pytest.mark.parametrize("name", ["adam", "Adam", "ADAM", "AdamW", "adamw"])
def test_adam_is_decoupled_and_does_not_decay_unasked(name):
    optimizer = build_optimizer(name, {"lr": 1e-3, "betas": [0.9, 0.95]}, parameters())
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.0, (0.9, 0.95), 1e-3)


def test_adam_w_mode_false_gives_l2_but_not_for_adamw():
    assert type(build_optimizer("Adam", {"adam_w_mode": False}, parameters())) is torch.optim.Adam
    assert type(build_optimizer("AdamW", {"adam_w_mode": False}, parameters())) is torch.optim.AdamW


def test_torch_adam_keeps_torch_defaults():
    assert build_optimizer("AdamW", {"torch_adam": True}, parameters()).param_groups[0]["weight_decay"] == 0.01


def test_deepspeed_only_parameters_are_taken_out_and_the_users_dict_is_not_changed():
    params = {
        "lr": 1e-3,
        "torch_adam": False,
        "adam_w_mode": True,
        "fp32_optimizer_states": True,
        "foreach": False,
        "bias_correction": True,
    }
    before = dict(params)
    optimizer = build_optimizer("AdamW", params, parameters())
    assert params == before
    assert optimizer.param_groups[0]["foreach"] is None


def test_groups_keep_their_own_values():
    decay, plain = parameters()
    groups = [{"params": [decay], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0, "lr": 5.0, "tag": "x"}]
    built = build_optimizer("AdamW", {"lr": 1.0, "weight_decay": 0.5}, groups).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in built] == [(1.0, 0.1), (5.0, 0.0)]
    assert built[1]["tag"] == "x"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_class_is_built_and_accepted(name):
    optimizer = build_optimizer(name, {"lr": 0.01}, parameters())
    assert type(optimizer).__name__ in (name, "AdamW")
    assert refuse_reason(optimizer) is None


@settings(max_examples=30)
@given(name=st.sampled_from(ELEMENTWISE), cut=st.integers(0, 12), seed=st.integers(0, 1000))
def test_stepping_two_pieces_equals_stepping_the_whole(name, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(12, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    pieces = [torch.nn.Parameter(start[:cut].clone()), torch.nn.Parameter(start[cut:].clone())]
    one = build_optimizer(name, {"lr": 0.1}, [whole])
    two = build_optimizer(name, {"lr": 0.1}, pieces)
    for _ in range(3):
        gradient = torch.randn(12, generator=generator)
        whole.grad = gradient
        pieces[0].grad, pieces[1].grad = gradient[:cut], gradient[cut:]
        one.step()
        two.step()
    torch.testing.assert_close(torch.cat([piece.data for piece in pieces]), whole.data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamW", {"max_grad_norm": 1.0}, ["optimizer.params.max_grad_norm", "gradient_clipping"]),
        ("AdamW", {"lr": "auto"}, ["optimizer.params.lr", '"auto"']),
        ("AdamW", {"betas": ["auto", 0.9]}, ["optimizer.params.betas", '"auto"']),
        ("AdamW", {"lr": "1e-3"}, ["optimizer.params.lr", "'1e-3'", "quotes"]),
        ("AdamW", {"lr": True}, ["optimizer.params.lr", "True"]),
        ("AdamW", {"betas": 0.9}, ["optimizer.params.betas", "2 numbers"]),
        ("AdamW", {"lr": -1.0}, ["optimizer.params", "-1.0"]),
        ("AdamW", {"weight_decy": 0.1}, ["optimizer.params.weight_decy", "'weight_decay'", "betas"]),
        ("AdamW", {"adam_w_mode": "yes"}, ["optimizer.params.adam_w_mode", "true or false"]),
        ("AdamW", {"bias_correction": False}, ["bias_correction"]),
        ("AdamW", {"fp32_optimizer_states": False}, ["fp32_optimizer_states"]),
        ("SGD", {"eps": 1e-8}, ["optimizer.params.eps", "momentum"]),
        ("AdmW", {}, ["'AdmW'", "'AdamW'"]),
        ("rmsprop", {}, ["'RMSprop'"]),
        ("Muon", {}, ["use_muon"]),
        ("MuAdamW", {}, ["mup", "initialize(optimizer="]),
        ("OneBitLamb", {}, ["norm"]),
        ("Optimizer", {}, ["unknown"]),
        ("lr_scheduler", {}, ["unknown"]),
        (None, {}, ["optimizer.type", "None"]),
        *[(name, {}, [name, "use Adam"]) for name in REFUSED_BY_TORCH],
    ],
)
def test_bad_input_names_key_value_and_fix(name, params, words):
    with pytest.raises(ConfigError) as caught:
        build_optimizer(name, params, parameters())
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


def test_refused_torch_classes():
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    for name in (*REFUSED_BY_TORCH, "Muon"):
        if hasattr(torch.optim, name):
            reason = refuse_reason(getattr(torch.optim, name)([matrix]))
            assert reason is not None and reason.startswith(name)


REFUSED_NAMES = [
    "FusedLamb",
    "DistributedFusedLAMB",
    "LAMB",
    "NVLamb",
    "Lans",
    "LARS",
    "FusedLARS",
    "LARC",
    "Adafactor",
    "AdafactorBigVision",
    "DistributedMuon",
    "MuonWithAuxAdam",
    "Shampoo",
    "DistributedShampoo",
    "SOAP",
    "GaLoreAdamW",
    "QGaLoreAdamW8bit",
    "APOLLOAdamW",
    "Lomo",
    "AdaLomo",
    "NovoGrad",
    "Adam_mini",
    "AdamMini",
    "SM3",
    "CAME",
    "SAM",
    "ASAM",
    "GSAM",
    "PSGD",
    "Kron",
    "DAdaptAdam",
    "Prodigy",
    "DoG",
    "DoWG",
    "Dion",
    "LBFGSNew",
    "KFACOptimizer",
]
FINE_NAMES = [
    "MyAdamW",
    "FusedAdam",
    "DeepSpeedCPUAdam",
    "Lion",
    "Adan",
    "Sophia",
    "SophiaG",
    "AdEMAMix",
    "AdamW8bit",
    "PagedAdamW",
    "CPUAdam",
    "RangerLite",
    "LambdaSGD",
    "LarsonSGD",
    "SampleAdam",
    "CameraSGD",
    "Cameron",
    "Prodigal",
    "AccordionSGD",
    "Yogi",
    "AdaBelief",
    "StableAdamW",
    "MADGRAD",
]


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_third_party_optimizers_that_need_more_than_an_element_are_refused_by_name(name):
    kind = type(name, (torch.optim.SGD,), {})
    child = type("Mine", (kind,), {})
    for optimizer in (kind(parameters(), lr=0.1), child(parameters(), lr=0.1)):
        reason = refuse_reason(optimizer)
        assert reason is not None and name in reason


@pytest.mark.parametrize("name", FINE_NAMES)
def test_names_that_only_look_alike_are_accepted(name):
    assert refuse_reason(type(name, (torch.optim.SGD,), {})(parameters(), lr=0.1)) is None


def test_a_wrapped_optimizer_is_looked_into():
    class Lookahead(torch.optim.SGD):
        optimizer: object

    outer = Lookahead(parameters(), lr=0.1)
    outer.optimizer = type("Lamb", (torch.optim.SGD,), {})(parameters(), lr=0.1)
    assert "Lamb" in (refuse_reason(outer) or "")
    outer.optimizer = outer
    assert refuse_reason(outer) is None
