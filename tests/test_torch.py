"""PyTorch models under hooks, against gradflow's own engine on the same weights."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow.branches.attention import Attention
from gradflow.branches.mlp import MLP
from gradflow.factors import CURVES, FACTORS
from gradflow.norms import Norm
from gradflow.stack import Given, Stack

torch = pytest.importorskip("torch")

DEPTH, D, HEADS, TOKENS, BATCH = 3, 16, 4, 5, 2


def encoder(norm_first=False, dtype=torch.float64, batch_first=True, dropout=0.1, depth=DEPTH):
    """`torch.nn.TransformerEncoder` with weights and gains that are nowhere 0 or 1."""
    torch.manual_seed(0)
    options = {"norm_first": norm_first, "batch_first": batch_first, "dtype": dtype, "dropout": dropout}
    layer = torch.nn.TransformerEncoderLayer(D, HEADS, 2 * D, **options)
    last = torch.nn.LayerNorm(D, dtype=dtype) if norm_first else None
    model = torch.nn.TransformerEncoder(layer, depth, norm=last, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=dtype) / p.shape[-1] ** (p.ndim > 1)
    return model


def states(dtype=torch.float64):
    return torch.randn(BATCH, TOKENS, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def sent():
    return torch.randn(BATCH, TOKENS, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def loss(out):
    return (out * sent().to(out.dtype)).sum()


def engine(model, norm_first):
    """The same network as a `Stack`, and its profile."""

    def gathered(name):
        return jnp.stack([jnp.asarray(dict(layer.named_parameters())[name].detach().numpy()) for layer in model.layers])

    def norm(number):
        return Norm(gathered(f"norm{number}.weight"), gathered(f"norm{number}.bias"), "layernorm", 1e-5)

    with jax.enable_x64(True):
        first = zip("qkv", jnp.split(gathered("self_attn.in_proj_weight"), 3, 1), strict=True)
        biases = zip("qkv", jnp.split(gathered("self_attn.in_proj_bias"), 3, 1), strict=True)
        attention = {f"w_{k}": w for k, w in first} | {f"b_{k}": b for k, b in biases}
        attention |= {"w_o": gathered("self_attn.out_proj.weight"), "b_o": gathered("self_attn.out_proj.bias")}
        mlp = {"w_in": gathered("linear1.weight"), "b_in": gathered("linear1.bias")}
        mlp |= {"w_out": gathered("linear2.weight"), "b_out": gathered("linear2.bias")}
        slots = [(norm(n), None, None) if norm_first else (None, None, norm(n)) for n in (1, 2)]
        last = None
        if norm_first:
            gain, bias = (jnp.asarray(p.detach().numpy()) for p in (model.norm.weight, model.norm.bias))
            last = Norm(gain, bias, "layernorm", 1e-5)
        scheme = "pre-ln" if norm_first else "post-ln"
        stack = Stack.make(scheme, (Attention(HEADS), MLP("relu", 2)), DEPTH, D, final_norm=norm_first)
        weights = Given((attention, mlp), tuple(slots), last)
        return gradflow.profile(stack, states().numpy(), sent().numpy(), weights=weights)


FIGURES = (
    *(*FACTORS, "net", "stream_rms", "branch_rms", "sum_rms", "stream_cosine", "alignment", "mean_component"),
    *("token_cosine", "gradient_cosine", "input_gradient_cosine", "trunk_projection", "trunk_alignment", "radius_gain"),
    *("branch_return", "degenerate", *(f"log_{name}" for name in CURVES)),
    *(f"branch_{slot}_{name}" for slot in ("in", "out") for name in ("affine", "projection", "norm")),
)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-ln", "pre-ln"])
def test_every_figure_is_the_engines(norm_first):
    model = encoder(norm_first)
    found, wanted = gradflow.torch.profile(model, states(), loss), engine(model, norm_first)
    for name in FIGURES:
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-10, atol=1e-12, err_msg=name)
    names = [f"{l + 1} {kind}" for l in range(DEPTH) for kind in ("attention", "mlp")]
    assert list(found.labels) == names + ["final norm"] * norm_first
    assert found.settings["scheme"] == ("pre-ln" if norm_first else "post-ln")
    assert found.settings["parity"] < 1e-14


def test_the_gains_are_plain_autograds():
    model, x = encoder(), states().requires_grad_()
    loss(model(x)).backward()
    sizes = x.grad.flatten(1).norm(dim=1) / sent().flatten(1).norm(dim=1)
    for p in model.parameters():
        p.grad = None
    found = gradflow.torch.profile(model, x, loss)
    np.testing.assert_allclose(found.exact[:, 0], sizes, rtol=1e-12)
    assert all(p.grad is None for p in model.parameters()), "no parameter's gradient is touched"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "no hook is left"


def test_a_frozen_model_has_the_same_gains():
    frozen = encoder().requires_grad_(False)
    found, wanted = (gradflow.torch.profile(model, states(), loss) for model in (frozen, encoder()))
    np.testing.assert_allclose(found.net, wanted.net, rtol=1e-12)


def test_padding_counts_nowhere():
    model, real = encoder(), torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 2]])
    batch = {"src": states(), "src_key_padding_mask": ~real}
    whole = gradflow.torch.profile(model, batch, lambda out: loss(out * real[..., None]), mask=real)
    short = gradflow.torch.profile(
        model, states()[1:, : TOKENS - 2], lambda out: (out * sent()[1:, : TOKENS - 2]).sum()
    )
    assert whole.settings["tokens"] == [TOKENS, TOKENS - 2]
    for name in (*FACTORS, "net", "stream_rms", "stream_cosine", "token_cosine", "gradient_cosine", "radius_gain"):
        np.testing.assert_allclose(getattr(whole, name)[1], getattr(short, name)[0], rtol=1e-10, err_msg=name)


def test_a_decoder_has_three_sublayers():
    layer = torch.nn.TransformerDecoderLayer(D, HEADS, 2 * D, 0.0, batch_first=True, dtype=torch.float64)
    model = torch.nn.TransformerDecoder(layer, 2)
    x = states().requires_grad_()
    loss(model(x, 2 * states() + 1)).backward()
    found = gradflow.torch.profile(model, (states(), 2 * states() + 1), loss)
    assert found.labels[:3] == ("1 attention", "1 attention-2", "1 mlp")
    sizes = x.grad.flatten(1).norm(dim=1) / sent().flatten(1).norm(dim=1)
    np.testing.assert_allclose(found.exact[:, 0], sizes, rtol=1e-12)


def test_layouts_are_one_profile():
    rows, columns = encoder(), encoder(batch_first=False)
    first = gradflow.torch.profile(rows, states(), loss)
    second = gradflow.torch.profile(columns, states().swapaxes(0, 1), lambda out: loss(out.swapaxes(0, 1)))
    np.testing.assert_allclose(first.net, second.net, rtol=1e-12)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-ln", "pre-ln"])
def test_autocast_is_near(norm_first):
    wide, model = encoder(norm_first), encoder(norm_first).float()
    wanted = gradflow.torch.profile(wide, states(), loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradflow.torch.profile(model, states(torch.float32), loss)
    assert found.settings["autocast"] == "bfloat16"
    for name in (*FACTORS, "net", "trunk", "exact"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=0.03, err_msg=name)
    assert np.abs(found.net / wanted.net - 1).max() > 1e-6, "bfloat16 is not float64"


class ShiftedNorm(torch.nn.Module):
    """As Gemma has it: the gain is 1 + w, the statistics are float32's."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(0.3 * torch.randn(D))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class Sandwich(torch.nn.Module):
    """x' = x + N(f(N(x))), which keeps what passes."""

    def __init__(self):
        super().__init__()
        self.before, self.after, self.f = ShiftedNorm(), ShiftedNorm(), torch.nn.Linear(D, D)

    def forward(self, x):
        h = self.before(x)
        f = self.f(h)
        u = x + self.after(f)
        self.kept = (x, h, f, u)
        return u


class Block(torch.nn.Module):
    """A user's block, x' = N(αx + f(x)), or without a norm outside."""

    def __init__(self, alpha=1.0, way="plain"):
        super().__init__()
        self.alpha, self.way = alpha, way
        self.norm = torch.nn.RMSNorm(D, eps=1e-6)
        self.f = torch.nn.Linear(D, D)
        self.g = torch.nn.Linear(D, D)

    def forward(self, x):
        if self.way == "post":
            return self.norm(self.alpha * x + self.f(x))
        h = self.norm(x)
        if self.way == "in place":
            x += self.f(h)
            return x
        if self.way == "in place on f":
            return self.f(h).add_(x)
        if self.way == "parallel":
            return x + self.f(h) + self.g(h)
        if self.way == "gains":
            return x + self.f(h) * torch.linspace(1, 2, D, dtype=x.dtype)
        if self.way == "detached":
            with torch.no_grad():
                return self.alpha * x + self.f(h)
        return self.alpha * x + self.f(h)


class Model(torch.nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def users(depth=2, **options):
    torch.manual_seed(3)
    return Model(*(Block(**options) for _ in range(depth))).double()


@pytest.mark.parametrize("way", ["plain", "post"])
def test_multipliers_are_measured(way):
    found = gradflow.torch.profile(users(alpha=1.7, way=way), states())
    np.testing.assert_allclose(found.settings["alpha"], 1.7, rtol=1e-12)
    np.testing.assert_allclose(found.skip, 1.7, rtol=1e-12)


def test_branches_in_parallel_are_the_sum_of_their_matrices():
    model, single = users(way="parallel"), users()
    with torch.no_grad():
        for one, two in zip(single.blocks, model.blocks, strict=True):
            one.f.weight, one.f.bias = (
                torch.nn.Parameter(p + q) for p, q in zip(two.f.parameters(), two.g.parameters(), strict=True)
            )
    found, wanted = gradflow.torch.profile(model, states()), gradflow.torch.profile(single, states())
    assert found.labels == ("1 mlp|mlp", "2 mlp|mlp")
    for name in (*FACTORS, "net", "branch_return", "branch_in_projection"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-12, err_msg=name)


def test_a_stack_without_norms_is_named_by_the_user():
    torch.manual_seed(5)
    model = users()
    for block in model.blocks:
        block.norm = torch.nn.Identity()
    found = gradflow.torch.audit(model, states(), loss, layers="blocks")
    assert found.settings["scheme"] == "no-norm"
    assert "no norm stands on the identity path" in found.verdict
    gains = [np.eye(D) + block.f.weight.detach().numpy() for block in model.blocks]
    back = sent().numpy() @ gains[1] @ gains[0]
    sizes = [np.linalg.norm(v, axis=(1, 2)) for v in (back, sent().numpy())]
    np.testing.assert_allclose(found.profile.exact[:, 0], sizes[0] / sizes[1], rtol=1e-12)
    np.testing.assert_array_equal(found.profile.trunk, 1)


def test_norms_inside_a_branch_take_what_autograd_says():
    torch.manual_seed(4)
    model = Model(Sandwich(), Sandwich()).double()
    found = gradflow.torch.profile(model, states(), loss)
    assert (found.settings["scheme"], found.settings["norm"]) == ("sandwich", "rms")
    out = model(states().requires_grad_())
    for number, block in enumerate(model.blocks):
        gradients = torch.autograd.grad(loss(out), block.kept, retain_graph=True)
        x, h, f, u = (g.flatten(1).norm(dim=1).numpy() for g in gradients)
        through = found.branch_out_affine * found.branch_out_projection * found.branch_out_norm
        np.testing.assert_allclose(through[:, number], f / u, rtol=1e-5)
        through = found.branch_in_affine * found.branch_in_projection * found.branch_in_norm
        np.testing.assert_allclose(through[:, number], found.branch_return[:, number] * u / h, rtol=1e-5)
        np.testing.assert_allclose(found.net[:, number], x / u, rtol=1e-5)


def test_a_stack_named_by_its_blocks_is_the_one_found():
    model = users()
    found, named = (
        gradflow.torch.profile(model, states(), layers=layers) for layers in (None, ["blocks.0", "blocks.1"])
    )
    np.testing.assert_array_equal(found.net, named.net)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Model):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = users()
    saving = Checkpointed(*model.blocks)
    refusal = pytest.raises(ValueError, match="use_reentrant") if reentrant else contextlib.nullcontext()
    with refusal:
        found = gradflow.torch.profile(saving, states())
        np.testing.assert_array_equal(found.net, gradflow.torch.profile(model, states()).net)


def compiled():
    model = users()
    model.blocks[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(users(), backend="eager"), "before torch.compile"),
        (compiled, "'blocks.1' is compiled"),
        (lambda: encoder().train(), "dropout is active at 'layers.0.self_attn'"),
        (lambda: users(way="in place"), "changed in place"),
        (lambda: users(way="in place on f"), "changed in place"),
        (lambda: users(way="gains"), "'blocks.0' is no chain of sums"),
        (lambda: users(way="detached"), "carries no gradient"),
        (lambda: torch.nn.Linear(D, D).double(), "layers: no list of like blocks"),
        (lambda: "model", "needs a torch.nn.Module, got str"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_a_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        gradflow.torch.profile(make(), states())
    assert "\n" not in str(caught.value)


def test_other_bad_input():
    model = users()
    with torch.no_grad(), pytest.raises(ValueError, match=r"outside torch\.no_grad"):
        gradflow.torch.profile(model, states())
    with pytest.raises(ValueError, match="did you mean 'blocks'"):
        gradflow.torch.profile(model, states(), layers="block")
    with pytest.raises(ValueError, match=r"has 2 stacks, 'a\.blocks', 'b\.blocks'"):
        gradflow.torch.profile(torch.nn.ModuleDict({"a": users(), "b": users()}), states())
    with pytest.raises(ValueError, match="one real number"):
        gradflow.torch.profile(model, states(), lambda out: out)
    with pytest.raises(ValueError, match="does not depend"):
        gradflow.torch.profile(model, states(), lambda out: model.blocks[0].f.weight.sum())
    with pytest.raises(ValueError, match="null space"):
        gradflow.torch.profile(encoder(), states(), lambda out: (out * 0).sum())


def test_a_norm_of_another_formula_is_refused():
    class HalfNorm(torch.nn.RMSNorm):
        def forward(self, x):
            return x / (1 + x.abs().mean(-1, keepdim=True))

    model = users()
    model.blocks[1].norm = HalfNorm(D, eps=1e-6).double()
    with pytest.raises(ValueError, match="HalfNorm gives neither"):
        gradflow.torch.profile(model, states())


def test_a_stream_that_is_read_elsewhere_fails_parity():
    class Leaking(Model):
        def forward(self, x):
            for block in self.blocks:
                y = block(x)
                self.extra = x
                x = y
            return x + 0.5 * self.extra

    torch.manual_seed(3)
    model = Leaking(*(Block(way="plain") for _ in range(2))).double()
    with pytest.raises(ValueError, match="read elsewhere"):
        gradflow.torch.profile(model, states(), lambda out: loss(out))


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-ln", "pre-ln"])
def test_an_audit_names_the_worst(norm_first):
    model = encoder(norm_first)
    found, profile = gradflow.torch.audit(model, states(), loss), gradflow.torch.profile(model, states(), loss)
    assert found.closed_form == pytest.approx(0.8 ** (2 * DEPTH)), "a final norm is no sub-layer"
    assert found.settings["loss"] == pytest.approx(loss(model(states())).item())
    np.testing.assert_array_equal(found.profile.net, profile.net)
    assert found.worst.label == profile.labels[int(np.argmin(profile.summary("net").mean))]
    assert "PyTorch's own gradients" in str(found)
    assert found.to_dict()["model"]["family"] == "PyTorch"
