"""Plain definitions of all losses and estimators, as loops over rows and tokens, to compare one's own with.

In: the arguments of the library's function of that name. Out: its results, without metrics, in float64 as slowly as it
takes; autograd of a loss is its gradient.
Begin with `losses.ppo_clip` and `advantages.grpo`; `laws.check_policy_loss(mine, reference=...)` compares with one.
"""

from fppo.laws.references import advantages as advantages
from fppo.laws.references import losses as losses
from fppo.laws.references import values as values
