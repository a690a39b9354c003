"""One controller over groups of ranks: values stay where they were computed, and functions are sent to them.

In: functions, and trees whose leaves may be handles (`Held`) to earlier results of a group. Out: handles, or the values
themselves if these are requested; on processes of this machine or of a Ray cluster.
Begin with `group.Group`; `rank` runs calls on a rank, `codec` packs trees.
"""

from fppo.fleet.clusters import Cluster, cluster
from fppo.fleet.group import LOCAL_GROUP, AnyGroup, Call, Group, GroupDied, LocalGroup, at_once, on
from fppo.fleet.held import HERE, Held, Here
from fppo.fleet.processes import Processes
from fppo.fleet.rank import RankSpec, Stays

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
    "RankSpec",
    "Stays",
    "at_once",
    "cluster",
    "on",
]
