"""Training that communicates every few steps: workers train alone, then average how far they came.

Local SGD (Stich, ICLR 2019, arXiv 1805.09767) averages the parameters. DiLoCo (Douillard et al.,
arXiv 2311.08105) gives the average difference to an outer optimizer as its gradient. Streaming
DiLoCo (arXiv 2501.18512) synchronises the model in fragments, and goes on meanwhile.
"""

from rota.local_sgd.diloco import DiLoCo
from rota.local_sgd.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
