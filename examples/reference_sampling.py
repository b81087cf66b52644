"""The law on paper: speculative sampling emits the target's distribution, whatever the draft's.

NumPy only. Change the numbers: the last two lines stay equal, and only the acceptance moves.
"""

import numpy as np

from mtplx.sampling import (
    SamplerConfig,
    acceptance_probability,
    distribution_from_logits,
    residual_distribution,
    speculative_output_marginal,
)
from mtplx.speculative import speculative_decode

target_logits = np.array([2.0, 1.0, 0.5, -1.0])
draft_logits = np.array([0.5, 2.0, -1.0, 0.0])
config = SamplerConfig(temperature=0.8, top_k=3)

p = distribution_from_logits(target_logits, config)
q = distribution_from_logits(draft_logits, config)
print("target p           ", p.round(3))
print("draft q            ", q.round(3))
print("acceptance by token", [round(float(acceptance_probability(p, q, t)), 3) for t in range(4)])
print("after a rejection  ", residual_distribution(p, q).round(3))
print("emitted, in theory ", speculative_output_marginal(p, q).round(3))

rng = np.random.default_rng(0)
first = [
    speculative_decode(target_logits, draft_logits, config, depth=2, rng=rng)[0]
    for _ in range(5_000)
]
print("emitted, counted   ", (np.bincount(first, minlength=4) / len(first)).round(3))
