"""Who gets which GPUs of a machine."""

import pytest
import torch

from fppo.fleet import RankSpec, cluster
from fppo.fleet.clusters import Gpus


def test_gpus_are_dealt_from_the_first_on():
    gpus = Gpus(4)
    assert gpus.deal(2, 1) == [(0,), (1,)]
    assert [gpus.deal(1, 1 / 3) for _ in range(3)] == [[(2,)]] * 3
    with pytest.raises(ValueError, match=r"2 ranks need 1 GPUs each; free of the 4 here: 1 of GPU 3"):
        gpus.deal(2, 1)
    assert gpus.deal(1, 0.75) == [(3,)]  # what was refused took none
    with pytest.raises(ValueError, match=r"1 ranks need 0.5 GPUs each; .*: 0.25 of GPU 3"):
        gpus.deal(1, 0.5)
    assert Gpus(4).deal(2, 2) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(("ranks", "each", "words"), [(2, 0.5, "cannot share a GPU"), (1, 1.5, "must be whole, or")])
def test_ranks_of_a_mesh_do_not_share_a_gpu(ranks, each, words):
    with pytest.raises(ValueError, match=f"gpus = {each}: .*{words}"):
        RankSpec(count=ranks, gpus=each)


@pytest.mark.parametrize("shares", range(1, 60))
def test_equal_shares_of_a_gpu_are_as_many_as_make_it_whole(shares):
    """Rounding takes none away, and adds none."""
    gpus = Gpus(1)
    assert [gpus.deal(1, 1 / shares) for _ in range(shares)] == [[(0,)]] * shares
    with pytest.raises(ValueError, match="free of the 1 here: nothing"):
        gpus.deal(1, 1 / shares)


def test_this_machine_deals_the_gpus_that_are_left_to_all_its_groups(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with cluster("processes") as here:
        none, one, two = here.ranks(), here.ranks(RankSpec(gpus=1)), here.ranks(RankSpec(count=2, gpus=1))
        assert [ranks.count for ranks in (none, one, two)] == [1, 1, 2]
        with pytest.raises(ValueError, match="free of the 3 here: nothing"):
            here.ranks(RankSpec(gpus=0.5))
    with cluster("processes") as again:
        assert again.ranks(RankSpec(count=3, gpus=1)).count == 3
