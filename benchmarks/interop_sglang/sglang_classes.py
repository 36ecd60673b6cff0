"""SGLang's disaggregation classes where there is no GPU. Runs in SGLang's environment.

Three packages that only GPUs need are stubbed for the import, and the getters of SGLang's runtime context are replaced
by plain objects; everything that is compared here is SGLang's own code.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")

STUBBED = ("torchvision", "sgl_kernel", "flashinfer")
LISTS = (
    *(
        "kv_data_ptrs",
        "kv_data_lens",
        "kv_item_lens",
        "kv_layer_ids",
        "aux_data_ptrs",
        "aux_data_lens",
        "aux_item_lens",
    ),
    *("state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids"),
    *("state_dim_per_tensor", "state_slice_outer_counts", "state_conv_shard_groups"),
)


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _AnyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {}) if name[:1].isupper() else MagicMock(name=name)


class _Stubs:
    """Finds and makes the stubbed packages, whatever is asked of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STUBBED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _AnyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _stub() -> None:
    from transformers.utils import import_utils  # must see that torchvision is absent before the stub stands in for it

    for probe in ("is_torchvision_available", "is_torchvision_v2_available", "is_vision_available"):
        getattr(import_utils, probe, lambda: None)()
    sys.meta_path.append(_Stubs())


_stub()

from sglang.srt.disaggregation.base.conn import KVArgs  # noqa: E402
from sglang.srt.disaggregation.common import conn  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402

BootstrapServer = conn.CommonKVBootstrapServer


class Flags(SimpleNamespace):
    """A namespace in which what nobody set is False."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def _concrete(base: type) -> type:
    """`base` with its abstract methods, which are the transfer backends', doing nothing."""
    nothing = {name: lambda self, *args, **more: None for name in base.__abstractmethods__}
    return type(base.__name__, (base,), nothing)


Manager = _concrete(conn.CommonKVManager)
Sender = _concrete(conn.CommonKVSender)
Receiver = _concrete(conn.CommonKVReceiver)


def set_context(port: int, shape: dict[str, int], rank: dict[str, int], more: dict[str, Any]) -> None:
    """What SGLang's process would know of itself: `shape` and `rank` by dp, cp, tp, pp; `port` of the registry."""
    parallel = Flags(
        dist_init_addr=None,
        pp_group=None,
        world_group=None,
        nnodes=1,
        node_rank=0,
        attn_dcp_size=1,
        attn_dcp_rank=0,
        dp_size=1,
        num_dp_ranks=shape["dp"],
        **{f"attn_{axis}_size": shape[axis] for axis in ("dp", "cp", "tp")},
        **{f"attn_{axis}_rank": rank[axis] for axis in ("dp", "cp", "tp")},
        pp_size=shape["pp"],
        tp_size=shape["tp"] * shape["dp"],
        load_balance_method=more.get("load_balance_method", "follow_bootstrap_room"),
    )
    disagg = Flags(
        disaggregation_bootstrap_port=port,
        disaggregation_decode_allocation_policy=more.get("policy", "early"),
        disaggregation_transfer_backend="mooncake",
    )
    conn.get_parallel = lambda: parallel
    conn.get_serving = lambda: Flags(host="127.0.0.1", port=30000)
    conn.get_disagg = lambda: disagg
    conn.get_schedule = lambda: Flags(chunked_prefill_size=8192, max_running_requests=64)
    conn.get_observability = Flags
    conn.get_device = lambda: Flags(device="cpu")
    conn.linear_attn_tp_size = lambda: shape["tp"]


def make_manager(mode: str, rank: dict[str, int], tp: int, more: dict[str, Any]) -> Any:
    """A real manager of this rank; as a prefill it registers while it is made."""
    args = KVArgs()
    for name in LISTS:
        setattr(args, name, [])
    args.engine_rank = rank["dp"] * tp + rank["tp"]
    args.kv_cache_dtype_str, args.page_size = more.get("kv_dtype", "float32"), more.get("page_size", 16)
    args.is_hybrid_mla_backend, args.swa_kv_cache_layout, args.ib_device, args.gpu_id = False, None, "", 0
    args.kv_head_num = args.total_kv_head_num = 8
    args.system_dp_rank, args.rust_http_port, args.pp_rank, args.prefill_start_layer = 0, None, rank["pp"], 0
    return Manager(args, DisaggregationMode(mode), Flags(), more.get("mla", False))
