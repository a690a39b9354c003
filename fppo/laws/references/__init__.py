"""Reference implementations of all losses and estimators, as loops over rows and tokens, to compare one's own with.

In: the arguments of the library's function of that name. Out: its results in float64, without metrics, and slowly;
autograd gives a loss's gradient.
Begin with `losses.ppo_clip` and `advantages.grpo`; `laws.check_policy_loss(mine, reference=...)` compares with one.
"""

from fppo.laws.references import advantages as advantages
from fppo.laws.references import losses as losses
from fppo.laws.references import values as values
