"""What `make gpu` runs on a machine with an NVIDIA GPU: run.py starts the other modules.

PYTHONPATH=benchmarks python3 -m gpu.run
"""
