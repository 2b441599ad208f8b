#!/bin/sh
# Every figure of the README, by the commands that stand beside them there. Run from the repository's root, gradflow on PATH.
set -eu
gradflow contraction --depth 24 --d 512 --plot docs/contraction.png
gradflow contraction --depth 6,12,24,48 --plot docs/depth.png
gradflow contraction --activations examples/data/minilm_stream.npz --plot docs/minilm.png
gradflow compare post-ln admin deepnorm pre-ln pre-ln+final sandwich --block mlp:gelu --depth 24 --d 128 --plot docs/compare.png
