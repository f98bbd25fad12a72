"""The benchmarks of `make gpu`, for a machine with an NVIDIA GPU. run.py starts the others; each by
itself, and what it takes:

    PYTHONPATH=python:benchmarks python3 -m gpu.NAME --help
"""
