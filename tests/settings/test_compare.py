"""The variants of a comparison, read from `--vary`."""

from fppo.settings.compare import variants


def test_values_are_split_outside_of_lists_and_a_list_without_its_end_is_no_value():
    """As it would become several values, or a text."""
    whole = variants(["reward.weights=[1, 0.5],[1, 0]", "seed=1,2"])
    assert [each.name for each in whole] == [
        *("reward.weights=[1, 0.5], seed=1", "reward.weights=[1, 0.5], seed=2"),
        *("reward.weights=[1, 0], seed=1", "reward.weights=[1, 0], seed=2"),
    ]
    assert whole[0].changes == {"reward.weights": [1.0, 0.5], "seed": 1}
    for torn in ("[1, 0.5", "[1, 0.5],[1, 0", '"a,b', "{name = 1"):
        assert variants([f"reward.weights={torn}"]) == []
