"""A stand-in for the module ray: a cluster inside of the test's process, whose actors are threads."""

from __future__ import annotations

import pickle
import queue
import threading
from concurrent.futures import Future
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

NAMES = ("ray", "ray.exceptions", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")
_END = object()


class RayError(Exception):
    """The error of which all of Ray's are."""


class RayActorError(RayError):
    """An actor that has ended."""


class GetTimeoutError(RayError, TimeoutError):
    """A result that did not come in time."""


class Ref:
    """The reference of a value, which travels pickled."""

    def __init__(self):
        self._future = Future()

    def future(self):
        return self._future

    def put(self, value):
        self._future.set_result(pickle.loads(pickle.dumps(value)))
        return self


class Stream:
    """The references of the items of an iterator."""

    def __init__(self):
        self.items = queue.SimpleQueue()

    def __iter__(self):
        while (item := self.items.get()) is not _END:
            yield item


class Method:
    """A method of an actor."""

    def __init__(self, actor, name, how):
        self._actor, self._name, self._how = actor, name, how

    def options(self, **how):
        return Method(self._actor, self._name, how)

    def remote(self, *args):
        answer = Stream() if self._how.get("num_returns") == "streaming" else Ref()
        self._actor.asked.put((self._name, args, answer))
        self._actor.names.append(self._how.get("name"))
        return answer


class Actor:
    """A thread that runs methods in turn, on a node with some of its GPUs; `lost` is the error of all further ones."""

    def __init__(self, cluster, make, how, node, gpus):
        self.how, self.node, self.gpus, self.names = how, node, gpus, []
        self.asked, self.lost = queue.SimpleQueue(), None
        threading.Thread(target=self._live, args=(cluster, make), daemon=True).start()

    def __getattr__(self, name):
        return Method(self, name, {})

    def _live(self, cluster, make):
        cluster.here.actor = self
        made = make()
        while True:
            name, args, answer = self.asked.get()
            try:
                if self.lost is not None:
                    raise self.lost
                args = [x.future().result() if isinstance(x, Ref) else pickle.loads(pickle.dumps(x)) for x in args]
                value = getattr(made, name)(*args)
                if isinstance(answer, Ref):
                    answer.put(value)
                    continue
                for item in value:
                    answer.items.put(Ref().put(item))
                    cluster.item_sent(self)
                answer.items.put(_END)
            except Exception as error:
                failed = answer if isinstance(answer, Ref) else Ref()
                failed.future().set_exception(error)
                if isinstance(answer, Stream):
                    answer.items.put(failed)


class Room:
    """A reservation of bundles of resources."""

    def __init__(self, cluster, bundles, strategy):
        self.cluster, self.bundles, self.strategy, self.waited = cluster, bundles, strategy, []

    def needs(self, name):
        return sum(bundle.get(name, 0.0) for bundle in self.bundles)

    def wait(self, seconds):
        self.waited.append(seconds)
        free = self.cluster.free
        if any(self.needs(name) > free[name] for name in free):
            return False
        self.cluster.taken.append(self)
        return True


class Cluster:
    """Nodes (address, id, GPUs), with a CPU for each of `cpus`; bundles are dealt to nodes from the last one on."""

    def __init__(self, nodes, cpus):
        self.nodes, self.total = nodes, {"CPU": float(cpus), "GPU": float(sum(len(gpus) for *_, gpus in nodes))}
        self.here, self.rooms, self.taken, self.actors, self.inits = threading.local(), [], [], [], []
        self.address, self.puts, self.starts_lost, self.cut, self.timeouts = None, [], [], None, []

    @property
    def free(self):
        return {name: size - sum(room.needs(name) for room in self.taken) for name, size in self.total.items()}

    def item_sent(self, actor):
        """A test may end a stream after its first item."""
        if self.cut is not None:
            cut, self.cut = self.cut, None
            cut(actor)

    def modules(self):
        """The modules by name."""
        made = {name: ModuleType(name) for name in NAMES}
        ray, exceptions, util, groups, strategies = made.values()
        ray.__spec__ = ModuleSpec("ray", None)
        ray.exceptions, ray.util = exceptions, util
        exceptions.RayError, exceptions.RayActorError = RayError, RayActorError
        util.placement_group, util.scheduling_strategies = groups, strategies
        util.get_node_ip_address = lambda: self.here.actor.node[0]
        groups.placement_group, groups.remove_placement_group = self._room, self.taken.remove
        strategies.PlacementGroupSchedulingStrategy = lambda room, *, placement_group_bundle_index: SimpleNamespace(
            room=room, index=placement_group_bundle_index
        )
        ray.init, ray.shutdown, ray.is_initialized = self._init, self._shutdown, lambda: self.address is not None
        ray.get_runtime_context, ray.kill = self._context, self._kill
        ray.cluster_resources, ray.available_resources = lambda: self.total, lambda: self.free
        ray.put, ray.get, ray.remote = self._put, self._get, self._remote
        return made

    def _room(self, bundles, *, strategy):
        self.rooms.append(Room(self, bundles, strategy))
        return self.rooms[-1]

    def _init(self, **how):
        self.inits.append(how)
        self.address = "10.0.0.1:6379" if how["address"] == "local" else how["address"]

    def _shutdown(self):
        self.address = None

    def _context(self):
        actor = getattr(self.here, "actor", None)
        if actor is None:
            return SimpleNamespace(gcs_address=self.address)
        return SimpleNamespace(get_accelerator_ids=lambda: {"GPU": actor.gpus}, get_node_id=lambda: actor.node[1])

    def _put(self, value):
        self.puts.append(value)
        return Ref().put(value)

    def _get(self, refs, timeout=None):
        if isinstance(refs, list):
            return [self._get(ref, timeout) for ref in refs]
        self.timeouts.append(timeout)
        try:
            return refs.future().result(timeout)
        except TimeoutError as error:
            raise GetTimeoutError("not in time") from error

    def _remote(self, kind):
        def made(how, args):
            where = how["scheduling_strategy"]
            count = int(how["num_gpus"])
            node = self.nodes[-1 - where.index % len(self.nodes)]
            first = where.index // len(self.nodes) * count
            actor = Actor(self, partial(kind, *args), how, node, node[2][first : first + count])
            actor.lost = self.starts_lost.pop(0) if self.starts_lost else None
            self.actors.append(actor)
            return actor

        return SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda *args: made(how, args)))

    def _kill(self, actor):
        actor.lost = RayActorError("killed")
