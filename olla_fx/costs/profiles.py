"""How fast devices are, as far as an estimate of an operator's seconds needs it.

Figures of GPUs are their maker's, dense (without sparsity), for the SXM boards: NVIDIA's data sheets of the
A100, H100 and H200. 60 % of a peak rate is what large matrix products and convolutions reach in practice.
Rates of float32 are those of TF32, which convolutions use by default, and matrix products if
``torch.set_float32_matmul_precision("high")`` allows it. ``a100`` has the bandwidth of the board with 40 GB
(1.555 TB/s), which published figures of recomputation assume. ``gtx1080ti`` is the GTX 1080 Ti, on which
published figures of swapping were measured: 11.3 TFLOP/s in float32, without tensor cores, and 484 GB/s. A
launch of 5 µs is what small kernels take one after the other when the host keeps up.

``cpu`` is one core with AVX-512 at about 2.5 GHz: two fused multiply-adds of 16 numbers a cycle are 160
GFLOP/s in float32, of which oneDNN's products and convolutions reach 120. Rates, bandwidth, launch and slow
operators were fitted to what ``examples/benchmarks/operator_costs.py`` measures, and those that it does not
meet to ``kernel_factors.py`` there. The estimate of any other operator is not relied on. :func:`profile_of`
takes it times the number of threads. Types that have no rate are computed at that of float32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from olla_fx.costs.work import Work
from olla_solvers.errors import OptionError

TERA = 1e12
GIGA = 1e9

_CORES_THAT_FILL_THE_BUS = 8
"""More threads than these read no faster from memory."""


@dataclass(frozen=True)
class DeviceProfile:
    """What an estimate knows of a device.

    Attributes:
        name: as on the command line.
        rates: floating-point operations in a second that large kernels reach, by type.
        bandwidth: bytes in a second, read and written together.
        launch_seconds: what an operator takes at least.
        slow: operators whose kernels take so many times as long as that says, by name.
        usual: operators that take about as long as that says; empty if all may be taken to.
    """

    name: str
    rates: Mapping[torch.dtype, float]
    bandwidth: float
    launch_seconds: float
    slow: Mapping[str, float] = field(default_factory=dict)
    usual: frozenset[str] = frozenset()

    def knows(self, operator: str) -> bool:
        """Return True if an operator's estimate is worth something.

        Args:
            operator: its name.
        """
        return not self.usual or operator in self.usual or operator in self.slow

    def rate(self, dtype: torch.dtype) -> float:
        """Return the floating-point operations in a second in a type."""
        return self.rates.get(dtype, self.rates[torch.float32])

    def seconds(self, operator: str, work: Work) -> float:
        """Return the seconds of an operator: a launch, and the longer of computing and moving.

        Args:
            operator: its name (:func:`olla_fx.costs.kinds.operator_name`).
            work: what it does.
        """
        computing, moving = work.flops / self.rate(work.dtype), work.moved_bytes / self.bandwidth
        return self.launch_seconds + self.slow.get(operator, 1.0) * max(computing, moving)

    def with_threads(self, threads: int) -> DeviceProfile:
        """Return the profile of so many cores."""
        rates = {dtype: rate * threads for dtype, rate in self.rates.items()}
        bandwidth = self.bandwidth * min(threads, _CORES_THAT_FILL_THE_BUS)
        return replace(self, rates=rates, bandwidth=bandwidth)


def _tensor_cores(float32: float, half: float, float64: float) -> dict[torch.dtype, float]:
    """Return 60 % of peak rates in TFLOP/s, by type."""
    reached = 0.6 * TERA
    return {
        torch.float32: reached * float32,
        torch.float16: reached * half,
        torch.bfloat16: reached * half,
        torch.float64: reached * float64,
    }


_SLOW_ON_CPU = {
    # Random numbers are drawn one by one.
    "dropout_mask": 190, "packed_dropout_mask": 1500, "native_dropout": 22, "bernoulli": 70, "normal": 18,
    "uniform": 18,
    "dropout_backward": 2.6,
    # Windows and sums that are not vectorised.
    "max_pool2d_with_indices": 26, "avg_pool2d": 11, "upsample_nearest2d": 9, "cumsum": 20, "where": 13,
    "_safe_softmax": 6, "masked_fill": 9, "cumprod": 7, "logsumexp": 4, "logcumsumexp": 83, "var": 34,
    "max_pool2d_with_indices_packed": 11, "max_pool3d_with_indices_packed": 11, "packed_le": 1.9,
    "packed_fill": 10, "std": 34,
    "max": 5, "min": 4, "argmax": 9, "sort": 69, "topk": 45, "median": 70,
    "upsample_bilinear2d": 12, "upsample_bicubic2d": 41, "grid_sampler_2d": 4, "im2col": 13,
    "_adaptive_avg_pool2d": 3, "diag_embed": 8, "_euclidean_dist": 5,
    # Functions of one number, or two.
    "gelu": 1.9, "log1p": 1.9, "_log_softmax": 2, "atan2": 2.4, "erfinv": 2.5, "log_sigmoid_forward": 2.7,
    "logaddexp": 2.9, "expm1": 3, "elu": 3.4, "isnan": 3.5, "cosh": 3.6, "sinh": 3.7, "softplus": 4.3,
    "fmod": 4.3, "remainder": 4.8, "mish": 11, "lgamma": 12, "digamma": 50, "special_i0e": 58,
    "_native_batch_norm_legit": 3.3, "native_batch_norm": 3.3, "native_layer_norm": 1.7,
    "native_layer_norm_backward": 1.7,
    # Few products for each number.
    "convolution in groups": 5, "convolution_backward in groups": 7,
    "_scaled_dot_product_flash_attention_for_cpu": 1.6,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1.6,
}  # fmt: skip

_USUAL_ON_CPU = frozenset(
    {
        # Products, which take the time of their operations.
        "addmm", "baddbmm", "bmm", "convolution", "dot", "mm", "mv",
        # What reads and writes each number once.
        "_prelu_kernel", "_softmax", "_to_copy", "abs", "add", "addcdiv", "addcmul", "amax", "amin",
        "arange", "as_strided_scatter", "atan", "batch_norm_again", "bitwise_and", "bitwise_not",
        "bitwise_or", "cat", "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy",
        "cos", "div", "embedding", "empty", "empty_like", "eq", "erf", "exp", "exp2", "expand_copy",
        "fill", "flip", "floor", "full", "full_like", "gather", "ge", "glu", "gt", "hardsigmoid",
        "hardswish", "hardtanh", "index", "index_copy", "index_select", "le", "leaky_relu", "lerp",
        "lift_fresh_copy", "linalg_vector_norm", "log", "log10", "log2", "logical_and",
        "logical_not", "logical_or", "lt", "maximum", "mean", "minimum", "mul", "native_group_norm",
        "ne", "neg", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
        "nll_loss_backward", "nll_loss_forward", "ones", "ones_like", "packed_dropout_backward",
        "pow", "prod", "reciprocal", "reflection_pad2d", "relu", "renorm", "repeat",
        "replication_pad2d", "roll", "round", "rsqrt", "rsub", "scalar_tensor", "select_backward",
        "select_scatter", "sigmoid", "sign", "silu", "sin", "slice_backward", "slice_scatter",
        "split_with_sizes_copy", "sqrt", "stack", "sub", "sum", "tan", "tanh", "threshold", "tril",
        "triu", "zero", "zeros", "zeros_like",
    }
)  # fmt: skip

PROFILES: Mapping[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        DeviceProfile("a100", _tensor_cores(156, 312, 19.5), 1.5 * TERA, 5e-6),
        DeviceProfile("h100", _tensor_cores(494.7, 989.4, 66.9), 3.35 * TERA, 5e-6),
        DeviceProfile("h200", _tensor_cores(494.7, 989.4, 66.9), 4.8 * TERA, 5e-6),
        # In half precision it multiplies as in float32; its own rate of that, a 64th, is used by nobody.
        DeviceProfile("gtx1080ti", _tensor_cores(11.3, 11.3, 0.35), 484 * GIGA, 5e-6),
        DeviceProfile(
            "cpu",
            {
                torch.float32: 120 * GIGA,
                torch.float64: 60 * GIGA,
                torch.bfloat16: 60 * GIGA,
                torch.float16: 60 * GIGA,
            },
            20 * GIGA,
            1.5e-6,
            _SLOW_ON_CPU,
            _USUAL_ON_CPU,
        ),
    )
}
"""The profiles by name."""

_USUAL_GPU = PROFILES["a100"]


def profile_by_name(name: str) -> DeviceProfile:
    """Return a profile.

    Raises:
        OptionError: if there is none of this name.
    """
    if name not in PROFILES:
        raise OptionError(f"there is no device profile {name!r}: one of {', '.join(PROFILES)}")
    return PROFILES[name]


def profile_of(device: torch.device) -> DeviceProfile:
    """Return the profile of a device that is there: by its name, and if that is unknown by its kind."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _profile_without_device(device)
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(device).lower())
    return next((PROFILES[word] for word in words if word in PROFILES), _USUAL_GPU)


def _profile_without_device(device: torch.device) -> DeviceProfile:
    if device.type in ("cpu", "meta"):
        return PROFILES["cpu"].with_threads(torch.get_num_threads())
    return _USUAL_GPU
