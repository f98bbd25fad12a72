"""The benchmarks of `make gpu`, for a machine with an NVIDIA GPU; run.py starts the others.

PYTHONPATH=benchmarks python3 -m gpu.run
"""
