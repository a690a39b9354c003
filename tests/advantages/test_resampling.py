import pytest
import torch

from fppo.advantages import resample
from fppo.key import Key


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("pow", [4.0, 0.0, 1.0, 0.25]), ("max_min", [1, 0, 0, 1.0]), ("max_random", [0.1, 0.1, 0.1, 0.4])],
)
def test_rows_are_drawn_by_their_weights(kind, weights):
    scores = torch.tensor([2.0, 0.0, -1.0, 0.5])
    if kind != "pow":
        scores = torch.tensor([-2.0, 0.0, 1.0, 1.5])
    expected = torch.tensor(weights) / sum(weights)
    noise = Key(3).uniform(torch.arange(4), 5000)
    drawn = torch.stack([resample(scores, column, kind=kind) for column in noise.T])
    found = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_the_draw_is_a_function_of_its_noise():
    scores, noise = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.5, 1.0 - 2**-53]).double()
    assert resample(scores, noise).tolist() == [0, 2, 2]
    assert torch.equal(resample(scores, noise), resample(scores, noise))
    assert resample(torch.zeros(0), torch.zeros(0)).tolist() == []
    assert resample(torch.zeros(3), noise).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="alike"):
        resample(scores, noise[:2])
