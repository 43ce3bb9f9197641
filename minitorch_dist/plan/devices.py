"""Devices that one can rent: what they hold, how fast they compute and send. From the makers' data sheets, dense."""

from dataclasses import dataclass

from ..comm.cost import Costs

GB, TERA = 1e9, 1e12
# Seconds that a message costs however short it is: the order of magnitude of NCCL's. It counts for small models only.
LATENCY = 5e-6


@dataclass(frozen=True)
class Device:
    """One accelerator in its usual machine.

    memory    bytes
    flops     {precision: peak FLOP/s}
    link      bytes per second, one way, to the devices of the same machine; network: to those of others, its share;
              host: to the host's memory
    per_node  devices per machine
    memory_bandwidth  bytes per second that its own memory gives
    """

    name: str
    memory: float
    flops: dict
    link: float
    network: float
    per_node: int
    host: float
    memory_bandwidth: float
    source: str = ""

    def costs(self, span):
        """comm.cost's Costs among ranks that lie within `span` devices side by side: the slowest link's. Adding up is
        left out: memory is ten times as fast as any link."""
        return Costs(LATENCY, 1 / (self.link if span <= self.per_node else self.network), 0.0)


DEVICES = {device.name: device for device in (
    Device("V100", 32 * GB, {"mixed": 125 * TERA, "float32": 15.7 * TERA}, 150 * GB, 6.25 * GB, 8, 16 * GB, 900 * GB,
           "NVIDIA V100 data sheet, SXM2: 300 GB/s NVLink both ways; DGX-1: 4 × 100 Gb/s for 8; PCIe 3.0 × 16"),
    Device("A100", 80 * GB, {"mixed": 312 * TERA, "float32": 19.5 * TERA}, 300 * GB, 25 * GB, 8, 32 * GB, 2039 * GB,
           "NVIDIA A100 data sheet, SXM4: 600 GB/s NVLink both ways; DGX A100: 8 × 200 Gb/s for 8; PCIe 4.0 × 16"),
    Device("H100", 80 * GB, {"mixed": 989 * TERA, "float32": 67 * TERA}, 450 * GB, 50 * GB, 8, 64 * GB, 3350 * GB,
           "NVIDIA H100 data sheet, SXM5: 900 GB/s NVLink both ways; DGX H100: 8 × 400 Gb/s for 8; PCIe 5.0 × 16"),
    Device("H200", 141 * GB, {"mixed": 989 * TERA, "float32": 67 * TERA}, 450 * GB, 50 * GB, 8, 64 * GB, 4800 * GB,
           "NVIDIA H200 data sheet, SXM5: 900 GB/s NVLink both ways; DGX H200: 8 × 400 Gb/s for 8; PCIe 5.0 × 16"),
)}


def device_named(name):
    """Of DEVICES; ValueError for an unknown one."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is unknown: take one of {', '.join(DEVICES)}, and change it by --memory, "
                         "--flops, --bandwidth, --memory-bandwidth")
    return DEVICES[name]
