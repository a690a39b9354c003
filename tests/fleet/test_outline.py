"""What is taken apart is what torch's pytrees take apart, and is put together again."""

import pickle

from hypothesis import example, given
from torch.utils import _pytree as pytree

from fppo.fleet.codec import flatten, unflatten
from fppo.tree import state
from tests.fleet.trees import TREES, Listed


@given(TREES)
@example([1, [2, {"x": (3, Listed([4]))}], None, 5])
def test_leaves_and_nodes_are_those_of_torchs_pytrees(value):
    outline, leaves = flatten(value)
    expected, spec = pytree.tree_flatten(value)
    assert [id(x) for x in leaves] == [id(x) for x in expected]
    numbered = unflatten(pickle.loads(pickle.dumps(outline)), range(len(leaves)))
    assert repr(numbered) == repr(spec.unflatten(range(len(leaves))))
    assert pytree.tree_structure(numbered) == spec


def test_a_class_may_become_one_of_nodes_after_it_was_seen():
    class Late:
        __module__, __qualname__, x = __name__, "Late", 1

    late = Late()
    assert flatten([late, 1]) == ((list, None, 2), [late, 1])
    pytree.register_pytree_node(Late, lambda late: ([late.x], None), lambda children, _: next(iter(children)))
    assert flatten([late, 1])[1] == [1, 1]
    assert flatten({"late": late})[1] == [1]


@state
class Empty:
    """A record without fields."""


def test_nodes_without_children_come_back():
    for value in ((), [], {}, {"x": ()}, Empty(), [Empty(), {}]):
        assert repr(unflatten(*flatten(value))) == repr(value)
