"""PyTorch itself, loaded when `gradflow.torch` is first used."""

from gradflow.adapters.parts import load

torch = load("torch", "torch")
