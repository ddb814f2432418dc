"""Records made by hand."""

from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.spec import Batch, Failures, Study

FAILURES = Failures(
    device_hours=50_000,
    detection_s=60,
    restart_s=300,
    write_bytes_per_s=1e9,
    read_bytes_per_s=1e9,
    copy_bytes_per_s=1e10,
    asynchronous=True,
)


def record(devices, rate=None, *, watts=None, good=None, **more):
    """A record; `rate` in tokens/s of all devices, None where nothing fits; `watts` per device; `good` a share."""
    where = {"model": "m", "seq_len": 4096, "node": "n", "strategy": "fsdp", "objective": "throughput"}
    where |= {"batch": "2 per device", "global_batch": 2 * devices}
    if rate is None:
        return Record(**(where | {"devices": devices, "fits": False, "why": "too large"} | more))
    seen = {
        "fits": True,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate / devices,
        "usd_per_hour": 2.0 * devices,
    }
    if watts is not None:
        seen |= {"power_w_per_device": watts, "power_w": watts * devices, "tokens_per_joule": rate / devices / watts}
    if good is not None:
        seen |= {"goodput_share": good, "goodput_tokens_per_s": good * rate}
    return Record(**(where | {"devices": devices} | seen | more))


def records(rates, **more):
    """A record for each number of devices."""
    return [record(devices, rate, **more) for devices, rate in rates.items()]


def study(**more):
    usual = {
        "name": "s",
        "title": "S",
        "models": ("m",),
        "seq_lens": (4096,),
        "nodes": ("n",),
        "devices": (8,),
        "batches": (Batch(per_device=2),),
        "strategies": (),
    }
    return Study(**(usual | more))
