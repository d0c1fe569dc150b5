"""Kernels on real hardware: right, free of races, invariant, in graphs; and a 7B model's steps. See gpu_check.sh."""
