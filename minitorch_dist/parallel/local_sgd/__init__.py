"""Workers that train by themselves and meet now and then: DiLoCo, for slow links; gossip, with a few neighbours each;
federated averaging, for data that stay where they are."""

from ...later import of_modules

__getattr__, __all__ = of_modules(__name__, {
    "diloco": ["DiLoCo"],
    "gossip": ["Gossip"],
    "topologies": ["Topology"],
    "federated": ["FederatedAveraging", "split_by_dirichlet", "split_by_label", "split_evenly"],
})
