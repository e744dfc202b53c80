"""Models and operators that are measured; they import torch, and run only on a virtual GPU."""
