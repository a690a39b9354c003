"""One Hypothesis profile: no deadline (the first call imports and warms up), the same examples in every run."""

import torch
from hypothesis import settings

settings.register_profile("fppo", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("fppo")
torch.set_num_threads(1)
