#!/bin/sh
# Every figure of the README, by the commands that stand beside them there. Run from the repository's root, gradflow on PATH.
set -eu
gradflow contraction --depth 24 --d 512 --plot docs/contraction.png
gradflow contraction --depth 6,12,24,48 --plot docs/depth.png
gradflow contraction --activations examples/data/minilm_stream.npz --plot docs/minilm.png
gradflow compare post-ln admin deepnorm pre-ln pre-ln+final sandwich --block mlp:gelu --depth 24 --d 128 --plot docs/compare.png
gradflow spectrum pre-ln --block attention,mlp:gelu --depth 6 --d 64 --tokens 4 --final-norm --plot docs/spectrum.png
gradflow sweep post-ln pre-ln deepnorm --block mlp:relu --depth 6,12,24 --width 64 --seeds 8 --out sweep.sqlite --csv rows.csv --plot docs/sweep.png
