"""The longest row for which a model's rotary angles stay as they are."""

from types import SimpleNamespace

import pytest

from fppo.models.lengths import longest_row

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        (DYNAMIC, 64),
        (LONG, 16),
        ({"full_attention": DYNAMIC, "sliding_attention": LONG}, 16),  # the first that changes
        ({"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}, 16),
    ],
)
def test_it_is_the_shortest_at_which_any_layers_angles_change(rope, longest):
    assert longest_row(SimpleNamespace(rope_parameters=rope, max_position_embeddings=64)) == longest
