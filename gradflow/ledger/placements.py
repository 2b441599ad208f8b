"""The primer on where the norm stands and which norm it is, at initialisation unless said otherwise."""

from typing import Any

from gradflow.ledger.claim import Case, Claim

PRIMER = "the primer"
EVEN: dict[str, Any] = {"least": 0.5, "most": 2.0}  # of one size: within a factor of two
STEADIER: dict[str, Any] = {"most": 0.8}  # at least a fifth less

CLAIMS = (
    Claim(
        "pre-ln-even",
        PRIMER,
        "In pre-LN the first and the last block get gradients of one size.",
        "gradflow compare pre-ln --block attention,mlp:relu --depth 24 --final-norm",
        "first block's over the last's: stream {stream:.2f}, weights {weights:.2f}; trained {trained_6:.1f}, {trained_18:.1f}",
        "compared:pre_ln_even",
        (
            Case("24 blocks at initialisation: gradient of the stream", "stream", **EVEN),
            Case("24 blocks at initialisation: gradient of the weights", "weights", **EVEN),
            Case("6 blocks at initialisation: gradient of the weights", "weights_6", **EVEN),
            Case("6 blocks, second half of 400 steps: ‖dW‖, first sub-layer over last", "trained_6", **EVEN),
            Case("18 blocks, second half of 400 steps: ‖dW‖, first sub-layer over last", "trained_18", **EVEN),
        ),
        quick=False,
    ),
    Claim(
        "pre-ln-stream",
        PRIMER,
        "The residual stream of pre-LN grows as √L.",
        "gradflow sweep pre-ln --block mlp:relu --depth 12,24,48",
        "exponent of depth {relu:.2f} (ReLU MLPs), {attention:.2f} (with attention); trained {trained:.2f}",
        "compared:pre_ln_stream",
        (
            Case("at initialisation, ReLU MLPs, sub-layers 12 to 96: exponent", "relu", 0.4, 0.6),
            Case("at initialisation, attention + ReLU MLP, sub-layers 12 to 96: exponent", "attention", 0.4, 0.6),
            Case("after 400 steps, 6 against 18 blocks: exponent", "trained", 0.4, 0.6),
        ),
        quick=False,
    ),
    Claim(
        "pre-ln-drowned",
        PRIMER,
        "The deep blocks of pre-LN are drowned by the stream: what they add hardly counts.",
        "gradflow compare pre-ln --block mlp:relu --depth 48",
        "share of the sum's power added at the last sub-layer: {last_48:.1%} of 48, {last_6:.0%} of 6",
        "compared:pre_ln_drowned",
        (
            Case("48 ReLU MLPs at initialisation: the last one's share of the power", "last_48", most=0.05),
            Case("6 ReLU MLPs at initialisation", "last_6", most=0.05),
            Case("a trained network", "trained", most=0.05, missing="stored runs that keep the branches' rms"),
        ),
    ),
    Claim(
        "both-books",
        PRIMER,
        "DeepNorm and residual scaling keep both books: the stream does not grow, nor does the gradient fade.",
        "gradflow compare deepnorm residual-scaling post-ln pre-ln --block mlp:relu --depth 24",
        "stream at the end, gain: DeepNorm {deepnorm_stream:.2f}, {deepnorm_gain:.2f}; scaling {residual-scaling_stream:.2f}, "
        "{residual-scaling_gain:.2f}",
        "compared:both_books",
        tuple(
            Case(f"{words}: {what}", f"{row}_{figure}", **EVEN)
            for row, words in (("deepnorm", "DeepNorm"), ("residual-scaling", "residual scaling"))
            for figure, what in (
                ("stream", "stream's rms before the last of 24 sub-layers over that before the first"),
                ("gain", "gain of the gradient over 24 sub-layers"),
                ("weights", "first sub-layer's weight gradient over the last's"),
            )
        ),
    ),
    Claim(
        "admin-evens",
        PRIMER,
        "Admin evens out how much each layer contributes to the output's variance.",
        "gradflow compare post-ln admin --block mlp:relu --depth 24",
        "largest contribution over least: Admin {admin:.2f}, post-LN {post_ln:.0f}",
        "compared:admin_evens",
        (
            Case(
                "24 ReLU MLPs at initialisation: largest share of a branch in the output over the least",
                "admin",
                most=2,
            ),
        ),
    ),
    Claim(
        "admin-mitigates",
        PRIMER,
        "And so it mitigates the instability of post-LN.",
        "python benchmarks/training.py remedies deep",
        "share that learns without warm-up: {learn_6:.0%} of 6 blocks, {learn_18:.0%} of 18; post-LN {bare:.0%}",
        "trained:admin_mitigates",
        (
            Case("6 blocks, no warm-up: each run learns (1) or not (0)", "learn_6", least=1),
            Case("18 blocks, no warm-up: each run learns (1) or not (0)", "learn_18", least=1),
        ),
        quick=False,
    ),
    Claim(
        "rms-cheaper",
        PRIMER,
        "RMSNorm is cheaper than LayerNorm.",
        "python benchmarks/claims.py rms-cheaper",
        "operations over LayerNorm's: the norm alone {norm:.2f}, a whole block {block:.4f}; time alone {time:.2f}",
        "jacobians:cheaper",
        (
            Case("operations of the norm alone, value and gradient, d = 256", "norm", most=0.95),
            Case("processor time of the norm alone, value and gradient, middle half of the pairs", "time", most=0.95),
            Case("operations of a pre-norm block (attention + MLP, d = 256), value and gradient", "block", most=0.99),
        ),
        quick=False,
    ),
    Claim(
        "rms-differs",
        PRIMER,
        "RMSNorm is not equivalent to LayerNorm.",
        "gradflow derive layernorm; gradflow derive rms",
        "relative difference: values {values:.2f}, on centred input {centred:.0e}, Jacobians there {jacobians:.2f}",
        "jacobians:differs",
        (
            Case("values, input with a mean (mean = deviation)", "values", least=0.01),
            Case("values, centred input", "centred", least=0.01),
            Case(
                "Jacobians, centred input (spectral norm of the difference over that of one)", "jacobians", least=0.01
            ),
        ),
    ),
    Claim(
        "rms-trained",
        PRIMER,
        "Nor are the networks that are trained with it: loss, and rounding of their weights.",
        "python benchmarks/training.py norms",
        "held-out loss over LayerNorm's: post-LN {post:+.3f} nats, pre-LN {pre:+.3f}; 8 bits: apart by {post_8:.0e}, {pre_8:.0e}",
        "tuning:rms_trained",
        (
            Case("post-LN: |t| of held-out loss, key by key, over its 95 % point", "post_t", least=1),
            Case("pre-LN: |t| of held-out loss, key by key, over its 95 % point", "pre_t", least=1),
            Case("post-LN, matrices of 8 bits: what that adds to the loss, difference in nats", "post_8", least=0.01),
            Case("pre-LN, matrices of 8 bits: what that adds to the loss, difference in nats", "pre_8", least=0.01),
            Case("post-LN, matrices of 4 bits: what that adds to the loss, difference in nats", "post_4", least=0.01),
            Case("pre-LN, matrices of 4 bits: what that adds to the loss, difference in nats", "pre_4", least=0.01),
        ),
        quick=False,
    ),
    Claim(
        "sandwich-experts",
        PRIMER,
        "Sandwich-LN, a norm behind the experts too, steadies a mixture of experts.",
        "python benchmarks/experts.py",
        "spread over pre-LN's: added {added:.2f}, returned {returned_switch:.2f} (switch) and {returned_moe:.2f} (two of 8)",
        "trained:sandwich_experts",
        (
            Case("what is added, token to token: coefficient of variation over pre-LN's", "added", **STEADIER),
            Case("the same with dropped tokens (capacity 1.25)", "added_dropped", **STEADIER),
            Case("what comes back, token to token, switch 8 × 1", "returned_switch", **STEADIER),
            Case("what comes back, token to token, two of 8", "returned_moe", **STEADIER),
            Case("gain over a router's imbalance, switch 8 × 1: |log| over pre-LN's", "drift_switch", **STEADIER),
            Case("gain over a router's imbalance, two of 8: |log| over pre-LN's", "drift_moe", **STEADIER),
        ),
        quick=False,
    ),
)
