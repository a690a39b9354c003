"""Groups of ranks on a Ray cluster: what groups of processes do, on whichever machine has room."""

import os
import signal

import pytest
import torch

from fppo.assembly.run import assemble
from fppo.fleet import HERE, Group, GroupDied, Processes, RankSpec, cluster, on_ray
from fppo.pipeline.program import RunState
from tests import tiny_run
from tests.assembly.test_placed import placed, steps
from tests.fleet.test_group import check_stream, fails_on, make, reduced, writes
from tests.fleet.test_processes import dies, pid

ray = pytest.importorskip("ray", reason="Ray is not installed here")
PATIENCE = 120.0


@pytest.fixture(scope="module")
def there():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with cluster("local") as made:
        yield made
    ray.shutdown()


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    return tmp_path


def twice(batch):
    return {name: 2 * x for name, x in batch.items()}


def test_values_stay_and_come_back_and_large_columns_are_sent_once(there):
    batch = {"small": torch.arange(3.0), "large": torch.arange(1 << 17)}
    with Group("one", there.ranks(RankSpec(threads=1)), patience=PATIENCE) as one:
        state, _ = one.call(make, HERE, 1.0, stays=(0,))
        assert float(one.call(dict, state)["x"][0]) == 1.0
        for _ in range(2):
            found = one.call(twice, batch)
            assert all(torch.equal(x, 2 * batch[name]) for name, x in found.items())
        assert len(there._sent._known) == 1
        with pytest.raises(ValueError, match="writes has written into its argument"):
            one.call(writes, {"b": torch.ones(3)}, 2.0)


def test_items_of_an_actor_come_one_by_one_until_it_dies(there, tmp_path):
    with Group("one", there.ranks(RankSpec(threads=1)), patience=PATIENCE) as one:
        check_stream(one, tmp_path)
        items = []
        with pytest.raises(GroupDied, match="was lost in dies"):
            one.call(dies, 3, on_item=items.append)
        assert items == [*range(len(items))]


def test_ranks_meet_and_one_that_is_killed_is_named(there):
    with Group("two", there.ranks(RankSpec(count=2, threads=1)), patience=PATIENCE) as two:
        assert two.call(reduced, HERE, 1.0) == 2.0
        first = two.call(pid, HERE)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(GroupDied, match=r"group 'two': rank [01] of 2 \(process \d+ on node .*was lost in reduced"):
            two.call(reduced, HERE, 1.0)
        two.start()
        assert two.call(reduced, HERE, 1.0) == 2.0
        with pytest.raises(KeyError):
            two.call(fails_on, HERE, 0)


def test_what_has_no_room_is_said(there):
    words = r"'many' did not start: 9 ranks need 1 CPU each, and the cluster has .* of 4 CPU free"
    with pytest.raises(GroupDied, match=words), Group("many", there.ranks(RankSpec(count=9))):
        pass
    with pytest.raises(GroupDied, match="1 ranks need 1 CPU, 1 GPU each"), Group("gpu", there.ranks(RankSpec(gpus=1))):
        pass


def test_which_cluster_is_never_guessed(there):
    with pytest.raises(ValueError, match=r"this process is in the Ray cluster at .* already, not in that"):
        cluster("10.0.0.1:6379")
    with pytest.raises(ValueError, match=r"there is no Ray cluster at 'auto'.*give the HOST:PORT of one that runs"):
        on_ray._check_reached("auto")


def test_roles_and_engines_on_a_cluster_are_one_process(there, task):
    settings = tiny_run.settings(task)
    with assemble(settings) as assembly:
        assert isinstance(assembly.run, RunState)
        expected = steps(assembly, {})
    engines = [there.ranks(), there.ranks()]
    assert placed(settings, {"actor": there.ranks(), "critic": there.ranks()}, engines=engines) == expected


def test_a_run_on_pools_of_two_ranks_each_is_that_of_other_processes(there, task):
    settings = tiny_run.settings(task)
    expected = placed(settings, {"actor": Processes(RankSpec(count=2)), "critic": Processes(RankSpec(count=2))})
    assert (
        placed(settings, {"actor": there.ranks(RankSpec(count=2)), "critic": there.ranks(RankSpec(count=2))})
        == expected
    )
