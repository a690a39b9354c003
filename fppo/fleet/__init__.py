"""One controller over groups of ranks: values stay where they were computed, and functions are sent to them."""

from fppo.fleet.clusters import Cluster, cluster
from fppo.fleet.group import LOCAL_GROUP, AnyGroup, Call, Group, GroupDied, LocalGroup, at_once, on
from fppo.fleet.held import HERE, Held, Here
from fppo.fleet.processes import Processes
from fppo.fleet.rank import Stays

__all__ = [
    "HERE",
    "LOCAL_GROUP",
    "AnyGroup",
    "Call",
    "Cluster",
    "Group",
    "GroupDied",
    "Held",
    "Here",
    "LocalGroup",
    "Processes",
    "Stays",
    "at_once",
    "cluster",
    "on",
]
