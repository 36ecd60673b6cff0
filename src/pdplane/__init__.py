"""pdplane: the control plane of prefill/decode disaggregated LLM serving."""

__version__ = "0.3.0"
