"""What `make gpu` runs on a machine with an NVIDIA GPU: run.py, and the benchmarks it starts.

PYTHONPATH=python:benchmarks python3 -m gpu.run
"""
