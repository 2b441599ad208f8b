"""The primer on training: warm-up, Adam, and which placement trains; read off the stored runs in docs/training."""

from gradflow.ledger.claim import Case, Claim
from gradflow.ledger.placements import PRIMER

RUNS = "python benchmarks/training.py {}"

CLAIMS = (
    Claim(
        "early-norm",
        PRIMER,
        "Early in training 1/‖u‖ is above its steady value, and falls during warm-up.",
        RUNS.format("warm-up"),
        "first step over the last: MLPs' norms {mlp:.2f}, attention's {attention:.2f}, without warm-up {bare:.2f}",
        "trained:early_norm",
        (
            Case("post-LN, 6 blocks, 200 steps of warm-up, norms of MLPs", "mlp", least=1.1),
            Case("the same, norms of attention", "attention", least=1.1),
            Case("without warm-up (does not learn), all norms", "bare", least=1.1),
        ),
        quick=False,
    ),
    Claim(
        "adam-early",
        PRIMER,
        "Adam's early updates are too large.",
        RUNS.format("warm-up"),
        "update's rms, first over later, {update:.1f}; the first step moves the last stream by {move:.0%}",
        "trained:adam_early",
        (
            Case("Adam's update: rms of the first over those of the second half of training", "update", least=2),
            Case("without warm-up the first step moves post-LN's last stream by half its size", "move", least=0.5),
        ),
        quick=False,
    ),
    Claim(
        "adam-cause",
        PRIMER,
        "And they are why post-LN fails without warm-up.",
        RUNS.format("warm-up optimizers"),
        "share that learns without warm-up: SGD at .1 {sgd:.0%}, RAdam {radam:.0%}; pre-LN (moved {pre_move:.0%}) {pre_ln:.0%}",
        "trained:adam_cause",
        (
            Case(
                "without such updates (SGD, lr 0.1, which trains behind a warm-up) each run learns (1)", "sgd", least=1
            ),
            Case("with their variance rectified (RAdam) each run learns (1)", "radam", least=1),
            Case("pre-LN, moved as far by its first step, fails as well (0)", "pre_ln", most=0),
        ),
        quick=False,
    ),
    Claim(
        "warm-up-helps",
        PRIMER,
        "Warm-up makes post-LN train.",
        RUNS.format("warm-up optimizers deep"),
        "share of runs that learn, with and without: 6 blocks {six:.0%}, {six_bare:.0%}; 18 blocks {deep:.0%}, {deep_bare:.0%}",
        "trained:warm_up_helps",
        (
            Case("6 blocks, Adam, lr 3e-3: loss less than without, nats", "six_saved", least=0.3),
            Case("6 blocks, RAdam, lr 3e-3: loss less than without, nats", "radam_saved", least=0.3),
            Case("6 blocks, SGD, lr 0.1: loss less than without, nats", "sgd_saved", least=0.3),
            Case("18 blocks, Adam, lr 3e-3: loss less than without, nats", "deep_saved", least=0.3),
        ),
        quick=False,
    ),
    Claim(
        "warm-up-leaves",
        PRIMER,
        "Warm-up helps, and still leaves the shallow blocks' gradients orders of magnitude below the deep ones'.",
        RUNS.format("warm-up deep"),
        "first sub-layer's weight gradient over the last's: 6 blocks {six:.2f}, 18 blocks {deep:.1e}",
        "trained:warm_up_leaves",
        (
            Case("6 blocks, second half of 400 steps (learns)", "six", most=0.1),
            Case("18 blocks, second half of 400 steps (does not learn)", "deep", most=0.1),
            Case("18 blocks that learn", "deep_learns", most=0.1, missing="a post-LN run of 18 blocks that learns"),
        ),
        quick=False,
    ),
    Claim(
        "post-ln-diverges",
        PRIMER,
        "Post-LN without warm-up diverges.",
        RUNS.format("warm-up deep no-warm-up"),
        "runs whose loss leaves the numbers: {diverged:.0%}; it ends {above:+.2f} nats from that of the bytes' frequencies",
        "trained:post_ln_diverges",
        (
            Case("the loss leaves the numbers (1) or not (0), 6 and 18 blocks, lr 3e-3", "diverged", least=1),
            Case("the loss ends above that of the bytes' frequencies: nats above", "above", least=0.5),
            Case("the loss leaves the numbers (1) or not (0), 6 blocks, lr 1e-2 and 3e-2", "larger", least=1),
        ),
        quick=False,
    ),
    Claim(
        "post-ln-stalls",
        PRIMER,
        "Weaker than that: post-LN without warm-up does not train.",
        RUNS.format("warm-up optimizers deep"),
        "runs that learn: 6 blocks {learn_6:.0%}, 18 blocks {learn_18:.0%}, 6 blocks with SGD at .03 {learn_sgd:.0%}",
        "trained:post_ln_stalls",
        (
            Case("6 blocks, Adam, lr 3e-3: each run learns (1) or not (0)", "learn_6", most=0),
            Case("18 blocks, Adam, lr 3e-3", "learn_18", most=0),
            Case("6 blocks, RAdam, lr 3e-3", "learn_radam", most=0),
            Case("6 blocks, SGD, lr 0.1", "learn_sgd_fast", most=0),
            Case("6 blocks, SGD, lr 0.03", "learn_sgd", most=0),
        ),
        quick=False,
    ),
    Claim(
        "post-ln-deep",
        PRIMER,
        "Beyond a dozen layers post-LN hardly trains at all.",
        RUNS.format("warm-up deep deep-remedies"),
        "share that learn with warm-up: {at_12:.0%} at 12 sub-layers, {at_36:.0%} at 36 (three rates), pre-LN {pre_36:.0%}",
        "trained:post_ln_deep",
        (
            Case("36 sub-layers, 200 steps of warm-up, lr 3e-3: share that learns", "at_36", most=0),
            Case("the same, lr 1e-3", "at_36_lower", most=0),
            Case("the same, lr 3e-4", "at_36_lowest", most=0),
            Case("and up to a dozen it trains: 12 sub-layers, with warm-up", "at_12", least=1),
            Case("36 sub-layers, 1,200 steps, 400 of them warm-up, lr 1e-3", "longer", most=0),
        ),
        quick=False,
    ),
    Claim(
        "post-ln-lower",
        PRIMER,
        "Tuned, post-LN ends at a slightly lower loss than pre-LN, and regularises more.",
        RUNS.format("warm-up rates tuned small-text"),
        "held-out loss of post-LN over pre-LN's: both at lr 3e-3 {same:+.3f} nats, each at its best rate {tuned:+.3f}; "
        "gap of held-out to training loss on a text read 27 times {gap_post:.3f}, pre-LN's {gap_pre:.3f}",
        "tuning:post_ln_lower",
        (
            Case("6 blocks, 1,200 steps, each at its best of five rates: held-out loss less pre-LN's", "tuned", most=0),
            Case("the same on a text read 27 times, 2,400 steps", "small", most=0),
            Case(
                "regularises, on that text: gap of held-out to training loss at the end, less pre-LN's", "gap", most=0
            ),
            Case("regularises: held-out loss less pre-LN's where both are at one training loss", "level", most=0),
        ),
        quick=False,
    ),
    Claim(
        "pre-ln-rates",
        PRIMER,
        "Pre-LN tolerates larger learning rates than post-LN.",
        RUNS.format("warm-up rates deep"),
        "6 blocks, warm-up: rates within .1 nats of the best span ×{width_pre:.3g} in pre-LN, ×{width_post:.3g} in post-LN",
        "tuning:pre_ln_rates",
        (
            Case(
                "18 blocks, 400 steps: pre-LN's largest rate that learns over the least at which post-LN fails",
                "ratio_18",
                least=2,
            ),
            Case("6 blocks, no warm-up: pre-LN learns where post-LN does not: difference of shares", "bare_6", least=1),
            Case(
                "6 blocks, 200 steps of warm-up: pre-LN's largest rate that learns over post-LN's",
                "ratio_6",
                least=1.01,
            ),
            Case("the same: span of the rates within .1 nats of the best, pre-LN's over post-LN's", "width_6", least=2),
        ),
        quick=False,
    ),
)
